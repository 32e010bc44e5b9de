"""`python -m scripts.describe_vllm`: write engine/vllm/arguments.json from the vLLM that is installed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.version import __version__  # type: ignore[attr-defined]

from dynamo_local.engine.vllm import arguments
from dynamo_local.engine.vllm.arguments import VllmKey
from dynamo_local.sdk.config.schema import Kind

TARGET = Path(arguments.__file__).with_name("arguments.json")

_KINDS: dict[str, Kind] = {
    "int": "int",
    "float": "float",
    "str": "str",
    "str_or_int": "any",
    "loads": "any",
    "parse_dataclass": "dict",
    "human_readable_int": "any",
    "human_readable_int_or_auto": "any",
    "union_dict_and_str": "any",
}


def describe() -> bytes:
    """The JSON document: version, engine keys, server keys, each sorted by name."""
    engine = _keys(AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()))
    every = _keys(make_arg_parser(FlexibleArgumentParser()))
    server = {name: spec for name, spec in every.items() if name not in engine}
    document = {
        "vllm": __version__.partition("+")[0],
        "engine": [engine[name] for name in sorted(engine)],
        "server": [server[name] for name in sorted(server)],
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def _keys(parser: argparse.ArgumentParser) -> dict[str, VllmKey]:
    groups = [(group.title or "", action) for group in parser._action_groups for action in group._group_actions]
    specs = (_spec(action, group) for group, action in groups if action.option_strings)
    return {spec.name: spec for spec in specs if spec.name not in ("help", "h")}


def _spec(action: argparse.Action, group: str) -> VllmKey:
    name = next(option for option in action.option_strings if option.startswith("--")).removeprefix("--")
    choices = tuple(choice for choice in action.choices or () if choice is not None)
    kind = _kind(action)
    return VllmKey(
        name=name.replace("_", "-"),
        kind=kind,
        # Choices of a list bound its items, which the engine checks itself.
        choices=() if kind == "list" else choices,
        optional=True,
        default=_plain(action.default),
        help=_first_sentence(action.help),
        group=group,
        aliases=tuple(option for option in action.option_strings if option not in (f"--{name}", f"--no-{name}")),
    )


def _kind(action: argparse.Action) -> Kind:
    if action.nargs == 0:
        return "bool"
    if action.nargs in ("+", "*") or isinstance(action, argparse._AppendAction):
        return "list"
    return _KINDS.get(_converter(action.type), "any")


def _converter(convert: Any) -> str:
    """Name of the function that converts the argument, seen through vLLM's `optional_type` wrapper."""
    name = getattr(convert, "__name__", "str" if convert is None else "any")
    if name == "_optional_type" and convert.__closure__:
        return _converter(convert.__closure__[0].cell_contents)
    return str(name)


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | bool) and value != argparse.SUPPRESS else None


def _first_sentence(text: str | None) -> str:
    flat = " ".join((text or "").replace("%%", "%").split())
    return flat.partition(". ")[0].rstrip(".")[:160]


if __name__ == "__main__":
    TARGET.write_bytes(describe())
