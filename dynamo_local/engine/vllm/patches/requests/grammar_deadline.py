"""Deadline for the compilation of a grammar in an engine.

A request whose grammar takes longer fails, by its own fault (requests/faults.py). The grammar of a request whose client
has left is not compiled.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from dynamo_local.engine.vllm.frontend.grammar_threads import GrammarThreads, timeout_of
from dynamo_local.engine.vllm.patches.check import applies
from dynamo_local.engine.vllm.requests.faults import blame


class _AbandonedError(Exception):
    """A request has ended before the compilation of its grammar has begun."""


@cache
def limit_grammar_compilation() -> None:
    """Limit the time in this process, and so in those forked from it. A second call changes nothing."""
    if not applies("deadlines of grammars"):
        return
    manager: Any = StructuredOutputManager
    manager.__init__ = _with_threads(manager.__init__)
    manager._create_grammar = _unless_ended(manager._create_grammar)


def threads_of_engine(timeout_s: float) -> GrammarThreads:
    """Make the threads of an engine: as many at once as vLLM has."""
    return GrammarThreads(max(1, (multiprocessing.cpu_count() + 1) // 2), timeout_s, late=_blame_late(timeout_s))


def _with_threads(initialise: Callable[..., None]) -> Callable[..., None]:
    @wraps(initialise)
    def init(manager: Any, vllm_config: Any) -> None:
        initialise(manager, vllm_config)
        if not vllm_config.model_config.skip_tokenizer_init:
            manager.executor.shutdown(wait=False)
            manager.executor = threads_of_engine(timeout_of(os.environ))

    return init


def _unless_ended(create: Callable[[Any, Request], Any]) -> Callable[[Any, Request], Any]:
    @wraps(create)
    def create_grammar(manager: Any, request: Request) -> Any:
        if request.is_finished():
            raise _AbandonedError
        return create(manager, request)

    return create_grammar


def _blame_late(timeout_s: float) -> Callable[[Request], None]:
    def late(request: Request) -> None:
        if request.num_output_tokens:
            # Another engine has compiled it before.
            blame(request, "lost", "the grammar of the structured output could not be compiled again in time")
        else:
            why = f"the grammar of the structured output takes longer than {timeout_s:g} s to compile"
            blame(request, "request", f"{why} (setting grammar-timeout-s)")

    return late
