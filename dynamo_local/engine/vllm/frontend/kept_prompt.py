"""The prompt of the request in this context, if it was kept when the request was begun."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar

KeptPrompt = Callable[[Sequence[int], str], Sequence[int]]
"""Returns the tokens to go on with, given those that are rendered now, and a digest of the tokenizer's vocabulary."""

kept_prompt: ContextVar[KeptPrompt | None] = ContextVar("prompt of this answer", default=None)
"""None: no prompt is kept."""
