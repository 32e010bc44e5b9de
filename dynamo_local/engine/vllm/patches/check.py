"""Compares foreign code with what the table of patches (table.py) expects of it, before a patch is applied.

The pinned vLLM is not looked at: the contract tests hold it. In any other version, and in other libraries, each part
is compared; a difference is logged in one line, and the patch is either left out or the process refuses to start. A
patch without parts is left out in any other version.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from pathlib import Path
from typing import Any, Final

from dynamo_local.core.errors import EngineError
from dynamo_local.engine.vllm.patches.table import PATCHES

TESTED: Final = "0.32.0"
"""Version of vLLM that pyproject.toml installs."""

_log = logging.getLogger(__name__)


def why_not(name: str) -> str | None:
    """Name the first part that differs from what this patch expects; None if all are as expected."""
    patch = PATCHES[name]
    if patch.of == "vLLM" and _version() == TESTED:
        return None
    if not patch.parts:
        return f"this is done with vLLM {TESTED} alone"
    found = (_difference(part) for part in patch.parts)
    return next((each for each in found if each is not None), None)


def applies(name: str) -> bool:
    """Whether the patch can be applied here. If not, the log says why and what happens without.

    Raises EngineError for a patch that cannot be left out.
    """
    why = why_not(name)
    if why is None:
        return True
    patch = PATCHES[name]
    whose = f"vLLM {_version()}" if patch.of == "vLLM" else patch.of
    difference = f"{whose} is not as expected, for {name}: {why}"
    if patch.without is None:
        raise EngineError(difference, f"install vLLM {TESTED}, with which this works")
    _log.warning("%s; %s", difference, patch.without)
    return False


def require(*names: str) -> None:
    """Raise EngineError, in one line, unless all of these patches can be applied here."""
    for name in names:
        applies(name)


def _version() -> str:
    from vllm.version import __version__  # type: ignore[attr-defined]

    version: str = __version__
    return version.partition("+")[0]


def _difference(part: str) -> str | None:
    module, separator, rest = part.partition("~" if "~" in part else ":")
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        return f"{module} cannot be imported ({error})"
    if separator == "~":
        return None if rest in Path(imported.__file__ or "").read_text() else f"{module} knows no {rest}"
    name, parenthesis, parameters = rest.partition("(")
    try:
        found = _resolve(imported, name)
    except AttributeError:
        return f"{module} has no {name}"
    wanted = [each for each in parameters.removesuffix(")").split(", ") if each]
    return _other_parameters(f"{module}.{name}", found, wanted) if parenthesis else None


def _resolve(of: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        if not hasattr(of, name) and name in _annotated(of):
            # A field without a default is no attribute of its class.
            return None
        of = getattr(of, name)
    return of


def _annotated(of: Any) -> set[str]:
    return {name for each in getattr(of, "__mro__", ()) for name in vars(each).get("__annotations__", {})}


def _other_parameters(name: str, function: Any, wanted: list[str]) -> str | None:
    try:
        has = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return f"{name} is no function whose parameters are known"
    if wanted[-1:] == ["..."]:
        missing = [each for each in wanted[:-1] if each not in has]
        return f"{name} has no parameter {missing[0]}" if missing else None
    return None if has == wanted else f"{name} takes ({', '.join(has)}), not ({', '.join(wanted)})"
