"""Suggestions for wrong names in errors, short enough for one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MAX_NAMES = 12


def suggest(wrong: str, allowed: Iterable[str], what: str = "allowed are") -> str:
    """Return `did you mean X?` if an allowed name is similar, else the allowed names, or the first of them."""
    names = list(allowed)
    close = difflib.get_close_matches(wrong, names, n=3)
    if close:
        return f"did you mean {' or '.join(close)}?"
    if not names:
        return f"{what} none"
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{what} {', '.join(names[:_MAX_NAMES])}{more}"
