"""What is known, within vLLM's application, of the HTTP request that it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from dynamo_local.core.usage.records import Tally

KeptPrompt = Callable[[Sequence[int], str], Sequence[int]]
"""Returns the tokens to go on with, given those that are rendered now, and a digest of the tokenizer's vocabulary."""


@dataclass(slots=True)
class ApplicationContext:
    """The context of one request. `tally`: counts its tokens; None: nobody does. `kept_prompt`: returns the prompt that
    was kept when it was begun; None: none was."""

    tally: Tally | None = None
    kept_prompt: KeptPrompt | None = None


current_request: ContextVar[ApplicationContext | None] = ContextVar("HTTP request", default=None)
"""None: outside of HTTP."""
