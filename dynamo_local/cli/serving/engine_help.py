"""Output of `dynamo serve --help-engine`: vLLM's options, as `dynamo serve` takes them. vLLM is not imported."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from dynamo_local.core.errors import UsageError
from dynamo_local.core.suggestions import suggest
from dynamo_local.engine.vllm.arguments import VllmKey, described_vllm, every_argument
from dynamo_local.engine.vllm.command_line import REFUSED

_WIDTH = 100
_INDENT = " " * 6
_TITLES = {"options": "General"}


def engine_help(pattern: str) -> str:
    """The options whose group, name or help has the pattern, in any case; "" is all. Raises UsageError for none."""
    arguments = every_argument()
    groups: dict[str, list[VllmKey]] = {}
    for argument in arguments.values():
        groups.setdefault(_TITLES.get(argument.group, argument.group), []).append(argument)
    wanted = pattern.lower().replace("_", "-").lstrip("-")
    named = {title: keys for title, keys in groups.items() if wanted in (title.lower(), _short(title))}
    found = named or {title: [key for key in keys if _matches(key, wanted)] for title, keys in groups.items()}
    if not any(found.values()):
        raise UsageError(f"no option of vLLM has {pattern!r}", suggest(pattern, groups, "its groups are"))
    head = f"Options of vLLM {described_vllm()}, as `dynamo serve` takes them. Groups: {', '.join(sorted(groups))}."
    parts = [textwrap.fill(head, _WIDTH)]
    for title in sorted(found):
        if found[title]:
            parts.append("\n".join([f"{title}:", *(line for key in found[title] for line in _lines(key))]))
    return "\n\n".join(parts)


def _short(title: str) -> str:
    """A group as people name it: "cache" for "CacheConfig"."""
    return title.lower().removesuffix("config")


def _matches(key: VllmKey, wanted: str) -> bool:
    return wanted in key.name or wanted in key.help.lower()


def _lines(key: VllmKey) -> Iterator[str]:
    names = ", ".join((*key.aliases, f"--{key.name}"))
    yield f"  {names}{_value(key)}"
    if key.name in REFUSED:
        yield from _filled(f"Not taken: {REFUSED[key.name]}.")
        return
    said = [f"{key.help}."] if key.help and not key.help.startswith("API docs") else []
    if key.default not in (None, "") and key.kind != "bool":
        said.append(f"[default: {key.default}]")
    if said:
        yield from _filled(" ".join(said))


def _value(key: VllmKey) -> str:
    if key.kind == "bool":
        return f", --no-{key.name}"
    if key.choices:
        return f" {{{','.join(map(str, key.choices))}}}"
    return {"list": " ITEM...", "dict": " JSON", "int": " N", "float": " X"}.get(key.kind, " VALUE")


def _filled(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
