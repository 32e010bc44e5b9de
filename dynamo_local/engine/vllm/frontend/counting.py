"""Where the tokens of the HTTP request in this context are counted."""

from __future__ import annotations

from contextvars import ContextVar

from dynamo_local.core.usage.records import Tally

counting: ContextVar[Tally | None] = ContextVar("tally of this request", default=None)
"""None: nobody counts, as for requests outside of HTTP."""
