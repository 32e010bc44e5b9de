"""API keys as text. Pure, apart from the local time zone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from dynamo_local.cli.output.console import date, facts, table
from dynamo_local.core.keys.values import KeyView

_HEADERS = ("NAME", "ENDPOINTS", "REQUESTS/MIN", "TOKENS/MIN", "AT ONCE", "BEST PRIORITY", "EXPIRES", "ADMIN")
_ANY = "-"


def keys_as_json(views: Sequence[KeyView]) -> str:
    """Return keys as indented JSON, with all fields."""
    return _indented([msgspec.structs.asdict(view) for view in views])


def key_as_json(view: KeyView, secret: str | None) -> str:
    """Return a key and its secret as indented JSON."""
    return _indented({**msgspec.structs.asdict(view), "secret": secret})


def table_of_keys(views: Sequence[KeyView]) -> str:
    """Return a line for each key."""
    if not views:
        return "there are no keys, and everybody who reaches the server is answered; create one: dynamo key create NAME"
    return table(_HEADERS, [_cells(view) for view in views])


def description_of_key(view: KeyView) -> str:
    """Return what a key allows, a line for each fact."""
    return facts(_facts(view))


def _cells(view: KeyView) -> tuple[str, ...]:
    return (
        view.name,
        ", ".join(view.endpoints) or "all",
        _number(view.requests_per_minute),
        _number(view.tokens_per_minute),
        _number(view.requests_at_once),
        _number(view.best_priority),
        _ANY if view.expires_at is None else date(view.expires_at),
        "yes" if view.admin else _ANY,
    )


def _facts(view: KeyView) -> Iterator[tuple[str, str]]:
    yield "key", view.name
    yield "endpoints", ", ".join(view.endpoints) or "all"
    limits = {"a minute": view.requests_per_minute, "at once": view.requests_at_once}
    yield "requests", ", ".join(f"{number} {what}" for what, number in limits.items() if number is not None)
    yield "tokens", "" if view.tokens_per_minute is None else f"{view.tokens_per_minute} a minute"
    yield "best priority", "" if view.best_priority is None else str(view.best_priority)
    yield "default priority", "" if view.default_priority is None else str(view.default_priority)
    yield "expires", "" if view.expires_at is None else date(view.expires_at)
    yield "admin", "may change endpoints and keys" if view.admin else ""
    yield "former secret", "" if view.former_until is None else f"valid until {date(view.former_until)}"


def _number(number: int | None) -> str:
    return _ANY if number is None else str(number)


def _indented(plain: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(plain), indent=2).decode()
