"""The inputs of a request for pooled outputs (embeddings, classes, scores), in the fields of the several APIs. Pure.

Each becomes a sequence of its own in the engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_LISTS = {"input": str | list, "texts": str, "inputs": Mapping}
"""Fields with inputs that stand for themselves, and what each of many is. A list of numbers, or of messages, is one."""

_PAIRS = (
    ("query", "documents"),
    ("queries", "documents"),
    ("queries", "items"),
    ("text_1", "text_2"),
    ("data_1", "data_2"),
)
"""Fields with texts that are scored against each other. A model may embed each, so both sides count."""

_FIELDS = frozenset({*_LISTS, *(other for _, other in _PAIRS)})
"""Without any of them, a request has no inputs."""


def number_of_inputs(fields: Mapping[str, Any]) -> int:
    """Count the inputs, at least as many as the engines get. 0: the request has none in any of these fields."""
    if _FIELDS.isdisjoint(fields):
        return 0
    return max((sum(len(side) for side in sides) for _, sides in _found(fields)), default=0)


def characters_of_inputs(fields: Mapping[str, Any]) -> int:
    """Count the characters of the inputs, in whichever parts of them they are."""
    return sum(_characters(sides) for _, sides in _found(fields))


def field_of_inputs(fields: Mapping[str, Any]) -> str | None:
    """Name the field that has most inputs."""
    named = max(_found(fields), key=lambda found: sum(map(len, found[1])), default=None)
    return None if named is None else named[0]


def _found(fields: Mapping[str, Any]) -> Iterator[tuple[str, list[list[Any]]]]:
    """The fields in use, each with its inputs, those of both sides of a pair."""
    for name, kind in _LISTS.items():
        if (value := fields.get(name)) is not None:
            yield name, [value if isinstance(value, list) and value and isinstance(value[0], kind) else [value]]
    for one, other in _PAIRS:
        if fields.get(one) is not None and fields.get(other) is not None:
            yield other, [_side(fields[one]), _side(fields[other])]


def _side(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _characters(value: Any) -> int:
    # A list of its own, not recursion: how deeply a body nests is its client's choice.
    total, waiting = 0, [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, list):
            # Token ids have no characters.
            waiting.extend(() if value and isinstance(value[0], int) else value)
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
    return total
