"""vLLM's options on the command line of `dynamo serve`, spelled as for `vllm serve`. vLLM is not imported.

--max-model-len 4096  --max-model-len=4096  --max_model_len 4096  -tp 2  --no-enable-prefix-caching
--hf-overrides.rope_theta=1e6  -O3  --served-model-name one two  --config FILE
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from dynamo_local.core.errors import ConfigError, UsageError
from dynamo_local.engine.vllm.arguments import AGREED, MANAGED, VllmKey, every_argument
from dynamo_local.sdk.config.schema import canonical
from dynamo_local.sdk.config.sections import Flag, parse_yaml, read_yaml

_WORKERS = "use --workers: each worker has a copy of the model, and the router spreads the requests"
_ONE_MACHINE = "leave it out: a server runs on one machine"

_COPIES = (
    "data-parallel-size", "data-parallel-size-local", "data-parallel-rank", "data-parallel-start-rank",
    "data-parallel-backend", "data-parallel-hybrid-lb", "data-parallel-external-lb",
    "data-parallel-multi-port-external-lb", "dp-sync-interval",
)  # fmt: skip
_MACHINES = ("data-parallel-address", "data-parallel-rpc-port", "nnodes", "node-rank", "master-addr")

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **MANAGED,
        **dict.fromkeys(_COPIES, _WORKERS),
        **dict.fromkeys(_MACHINES, _ONE_MACHINE),
        "api-key": "write the key into a file and use --Frontend.api-key-file=FILE: others see command lines",
        "device-ids": "set CUDA_VISIBLE_DEVICES, or use --cpu-slots",
        "api-server-count": "leave it out: one frontend serves all workers",
        "headless": "use --workers for more workers: each server has its API",
    }
)
"""Options of `vllm serve` that `dynamo serve` does not take, each with what to do instead."""

_OF_FRONTEND = frozenset(
    {"Frontend", "ModelConfig", "LoRAConfig", "MultiModalConfig", "ObservabilityConfig", "LoggingConfig"}
)
"""Groups of arguments that the frontend reads as well: its tokenizer, its checks of requests and its log."""
_ALSO_OF_FRONTEND = frozenset(
    {
        *AGREED, "diffusion-config", "disable-log-stats", "enable-log-requests", "kv-sharing-fast-prefill",
        "max-num-queued-reqs", "max-num-queued-tokens", "scheduling-policy", "stream-interval",
    }
)  # fmt: skip

OF_VLLM = "load-format"
"""A key that every service with vLLM's arguments has, and no other."""

_SERVICE_OPTION = re.compile(r"--[A-Z]\w*\.")
_CONFIG = "config"
_OPTIMIZATION = re.compile(r"-O=?(\w+)")


@dataclass(frozen=True)
class CommandLine:
    """The words of a command line by their kind, each in the order typed."""

    targets: tuple[str, ...]
    flags: tuple[Flag, ...]
    overrides: tuple[str, ...]
    """Options of one service, such as "--VllmWorker.seed=1"."""


def parse(words: Sequence[str]) -> CommandLine:
    """Sort the words that are no options of `dynamo serve` itself. Raises UsageError for what is no option of vLLM
    either, and for what is refused."""
    targets: list[str] = []
    overrides: list[str] = []
    flags: list[Flag] = []
    filed: list[Flag] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            targets.append(word)
        elif _SERVICE_OPTION.match(word):
            overrides.append(word)
        elif word.partition("=")[0] == f"--{_CONFIG}":
            filed.extend(_of_file(_value(word, rest)))
        else:
            flags.append(_flag(word, rest))
    return CommandLine(tuple(targets), tuple(_joined([*filed, *flags])), tuple(overrides))


def flag_of(key: str, text: str, typed: str, parts: Sequence[str] = ()) -> Flag:
    """The option for an argument of vLLM's, by its canonical name. Raises UsageError if it is refused."""
    if key in REFUSED:
        raise UsageError(f"{typed} is not for `dynamo serve`", REFUSED[key])
    argument = every_argument()[key]
    reads = argument.group in _OF_FRONTEND or key in _ALSO_OF_FRONTEND
    return Flag((key, *parts), text, typed, OF_VLLM, engines_only=not reads)


def _flag(word: str, rest: list[str]) -> Flag:
    """The option that a word begins; its values are taken from the words that follow."""
    level = _OPTIMIZATION.fullmatch(word)
    if level:
        return flag_of("optimization-level", level[1], "-O")
    typed = word.partition("=")[0]
    name, *parts = typed.split(".")
    key, negated = _find(name)
    if key in REFUSED:
        return flag_of(key, "", name)
    argument = every_argument()[key]
    if argument.kind == "bool":
        return flag_of(key, _switch(word, typed, negated), typed)
    if parts:
        return flag_of(key, _value(word, rest), typed, parts)
    if argument.kind == "list":
        return flag_of(key, _text(_values(word, rest)), typed)
    return flag_of(key, _spelled(argument, _value(word, rest)), typed)


def _find(name: str) -> tuple[str, bool]:
    """The argument that an option names, and whether the option is its negation. Raises UsageError."""
    arguments, aliases = every_argument(), _aliases()
    if name in aliases:
        return aliases[name], False
    key = canonical(name).removeprefix("--")
    if name.startswith("--") and key in arguments:
        return key, False
    positive = key.removeprefix("no-")
    if name.startswith("--no") and positive in arguments and arguments[positive].kind == "bool":
        return positive, True
    known = [f"--{option}" for option in arguments if option not in REFUSED]
    # Short names resemble each other by chance.
    close = difflib.get_close_matches(canonical(name), known, n=1, cutoff=0.75)
    help_text = "see `dynamo serve --help` and `dynamo serve --help-engine`"
    raise UsageError(f"there is no option {name}", f"did you mean {close[0]}?" if close else help_text)


@cache
def _aliases() -> Mapping[str, str]:
    aliases = {alias: key for key, argument in every_argument().items() for alias in argument.aliases}
    return {**aliases, "-O": "optimization-level"}


def _switch(word: str, typed: str, negated: bool) -> str:
    value = word.partition("=")[2].lower() if "=" in word else "true"
    if value not in ("true", "false"):
        raise UsageError(f"{typed} is a switch", f"write {typed}, without a value")
    return str((value == "true") != negated).lower()


def _value(word: str, rest: list[str]) -> str:
    """The value of an option: behind its "=", else the next word. Raises UsageError without one."""
    name, equals, text = word.partition("=")
    if equals:
        return text
    if not rest or (rest[0].startswith("--") and len(rest[0]) > 2):
        raise UsageError(f"{name} has no value", f"write {name} VALUE")
    return rest.pop(0)


def _values(word: str, rest: list[str]) -> list[str]:
    values = [_value(word, rest)]
    if "=" not in word:
        while rest and not rest[0].startswith("-"):
            values.append(rest.pop(0))
    return _listed(values)


def _listed(values: list[str]) -> list[Any]:
    """The items of a list that may have been typed as one, as in a configuration: "[a, b]"."""
    if len(values) == 1 and values[0].startswith("[") and values[0].endswith("]"):
        items = parse_yaml(values[0], "the list")
        return items if isinstance(items, list) else values
    return list(values)


def _spelled(argument: VllmKey, text: str) -> str:
    """The value as configuration spells it: numbers with suffixes such as 32k stay text, which vLLM converts."""
    return text if argument.kind != "str" or text not in ("null", "~") else f'"{text}"'


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _joined(flags: Sequence[Flag]) -> Iterator[Flag]:
    """The flags, with the items of lists that are given one by one (`--key.part+ item`) joined."""
    items: dict[tuple[str, ...], list[Any]] = {}
    for flag in flags:
        if len(flag.path) > 1 and flag.path[-1].endswith("+"):
            path = (*flag.path[:-1], flag.path[-1].removesuffix("+"))
            found = items.setdefault(path, [])
            found.append(parse_yaml(flag.text, flag.typed))
            yield replace(flag, path=path, text=_text(found))
        else:
            yield flag


def _of_file(path: str) -> Iterator[Flag]:
    """The options in a file for `vllm serve --config`: YAML, a key for each option. Raises ConfigError, UsageError."""
    tree = read_yaml(Path(path))
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path}: not a mapping", "write `option: value` lines")
    for name, value in tree.items():
        typed = f"{path}: {name}"
        key, negated = _find(f"--{name}")
        if every_argument()[key].kind == "bool" and isinstance(value, bool):
            value = value != negated
        yield flag_of(key, _text(value), typed)
