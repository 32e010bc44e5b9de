"""The priority that an HTTP request asks for: by a header, a field of its body, or its key. Pure.

The header goes before the field, as in vLLM, so that a proxy can set it without reading bodies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynamo_local.core.http.bounds.admission import Refusal
from dynamo_local.core.http.json_text import whole_number
from dynamo_local.core.keys.values import KeyTerms
from dynamo_local.core.priority.classes import MOST_PRIORITY

HEADER = "X-Vllm-Priority"
"""vLLM's own name for the header, which clients and proxies of vLLM send."""

HEADER_KEY = HEADER.lower().encode()

FIELD = "priority"

_NUMBER = re.compile(rb"[ \t]*([+-]?[0-9]{1,18})[ \t]*")


@dataclass(frozen=True)
class PriorityTerms:
    """What a caller may ask for. `best`: the lowest number; None: any. `default`: for requests that name none.
    `whose`: begins the refusal of a better one."""

    best: int | None
    default: int
    whose: str


WITHOUT_KEY = PriorityTerms(0, 0, "requests without a key")
"""Whoever brings no key may only let others go first."""

UNLIMITED = PriorityTerms(None, 0, "")


def terms_of(key: KeyTerms) -> PriorityTerms:
    """Return what requests of this key may ask for."""
    default = key.default_priority or 0
    if key.best_priority is not None:
        default = max(default, key.best_priority)
    return PriorityTerms(key.best_priority, default, f"key {key.name}")


def priority_asked(fields: Mapping[str, Any], header: bytes, terms: PriorityTerms) -> int | Refusal:
    """Return the priority of a request; a refusal if it is no whole number, or better than allowed. `header`: empty if
    there is none."""
    asked, what, param = (fields.get(FIELD), FIELD, FIELD) if not header else (_number(header), HEADER, None)
    if asked is None and not header:
        return terms.default
    if (asked := whole_number(asked)) is None:
        return Refusal(400, f"{what} is no whole number", "BadRequestError", param)
    if abs(asked) > MOST_PRIORITY:
        why = f"{what} is {asked}; write a whole number from {-MOST_PRIORITY} to {MOST_PRIORITY}"
        return Refusal(400, why, "BadRequestError", param)
    if terms.best is not None and asked < terms.best:
        why = f"{terms.whose} may have priority {terms.best} at best (lower numbers are served first), got {asked}"
        return Refusal(403, why, "PermissionDeniedError", FIELD)
    return asked


def _number(text: bytes) -> int | None:
    found = _NUMBER.fullmatch(text)
    return None if found is None else int(found[1])
