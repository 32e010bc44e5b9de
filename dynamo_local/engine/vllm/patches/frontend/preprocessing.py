"""Preparation of requests in vLLM's server, so that no request holds up the others.

- *Long texts* are tokenized by a thread of their own. vLLM has one for all, in which each waits for those before it.
- *Many tokens* are written as JSON by msgspec, sixteen times as fast as by Python's own encoder, which keeps all other
  threads waiting.
- *Grammars* are checked in threads, with a deadline, and not by the event loop itself. vLLM checks them again where it
  always has; that check is answered with what the thread has found.
- *Token ids* that the model does not have are refused before anything of their request is begun. vLLM looks at each
  prompt when its turn comes, which may be after the first token of another one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import JSONResponse
from vllm.entrypoints.serve.tokenize import api_router as tokenize_router
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from dynamo_local.engine.vllm.frontend.grammar_threads import (
    GrammarThreads,
    GrammarThreadsBusyError,
    GrammarTimeoutError,
    yield_to_others,
)
from dynamo_local.engine.vllm.patches.check import applies

LONG_TEXT = 32 * 1024
"""Characters. Tokenizing as many takes some ten milliseconds."""

_NICE = 10
"""Niceness of the thread for long texts: only requests with long texts wait a little longer."""


def prepare_concurrently(llm: AsyncLLM, grammar_timeout_s: float) -> None:
    """Apply all of these to one server."""
    if not applies("preparing requests beside each other"):
        return
    _set_long_texts_apart(llm.renderer)
    tokenize_router.JSONResponse = _QuickAnswer  # type: ignore[attr-defined]
    _refuse_unknown_tokens_first(llm.renderer)
    _GrammarChecks(llm, grammar_timeout_s).install()


class _QuickAnswer(JSONResponse):
    """JSONResponse with the same JSON, encoded by msgspec."""

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def _set_long_texts_apart(renderer: Any) -> None:
    executor = renderer._executor
    submit = executor.submit
    long_texts = ThreadPoolExecutor(1, thread_name_prefix="long-text", initializer=partial(yield_to_others, _NICE))

    def submit_by_length(function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        chosen = long_texts.submit if text_length(function) > LONG_TEXT else submit
        return chosen(function, *args, **kwargs)

    executor.submit = submit_by_length
    # With the renderer's own threads.
    renderer._resources.callback(long_texts.shutdown, wait=False)


def text_length(call: Any) -> int:
    """About how many characters, or tokens, a call of the renderer is about: those of its longest argument."""
    if not isinstance(call, partial):
        return 0
    return max((_size(value) for value in (*call.args, *call.keywords.values())), default=0)


def _size(value: Any, depth: int = 4) -> int:
    """Size of a prompt, a text, a list of token ids, or a conversation. Anything nested more deeply is no text."""
    if isinstance(value, str):
        return len(value)
    if depth == 0 or not isinstance(value, Mapping | list):
        return 0
    if isinstance(value, Mapping):
        return sum(_size(item, depth - 1) for item in value.values())
    if value and isinstance(value[0], int):
        return len(value)
    return sum(_size(item, depth - 1) for item in value)


def _refuse_unknown_tokens_first(renderer: Any) -> None:
    render = renderer.render_cmpl_async

    async def render_known(prompts: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        for prompt in prompts:
            if isinstance(prompt, Mapping) and (token_ids := prompt.get("prompt_token_ids")):
                renderer.validate_token_ids(token_ids)
        return await render(prompts, *args, **kwargs)

    renderer.render_cmpl_async = render_known


class _GrammarChecks:
    """Checks the parameters of requests with a grammar in threads."""

    def __init__(self, llm: AsyncLLM, timeout_s: float) -> None:
        self._llm: Any = llm
        self._timeout_s = timeout_s
        self._threads = GrammarThreads(max(1, len(os.sched_getaffinity(0)) // 2), timeout_s)
        self._validate: Callable[..., bool | None] = self._llm.input_processor._validate_params
        self._found: dict[int, bool | None] = {}
        """Results of checks, by the identity of parameters that are being added."""

    def install(self) -> None:
        add = self._llm.add_request

        async def add_checked(request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(params, SamplingParams) or params.structured_outputs is None:
                return await add(request_id, prompt, params, *args, **kwargs)
            self._found[id(params)] = await self._check(params)
            try:
                return await add(request_id, prompt, params, *args, **kwargs)
            finally:
                # Parameters of several prompts may be the same object.
                self._found.pop(id(params), None)

        self._llm.add_request = add_checked
        self._llm.renderer._resources.callback(self._threads.shutdown)
        self._llm.input_processor._validate_params = self._known

    def _known(self, params: Any, supported_tasks: Any) -> bool | None:
        if id(params) in self._found:
            return self._found[id(params)]
        return self._validate(params, supported_tasks)

    async def _check(self, params: SamplingParams) -> bool | None:
        tasks = await self._llm.get_supported_tasks()
        check: Future[bool | None] = self._threads.submit(self._validate, params, tasks)
        try:
            return await asyncio.wrap_future(check)
        except GrammarTimeoutError as error:
            why = f"the grammar of the structured output takes longer than {self._timeout_s:g} s to check"
            raise VLLMClientError(f"{why} (setting grammar-timeout-s)") from error
        except GrammarThreadsBusyError as error:
            raise GracefulHTTPError(str(error), HTTPStatus.SERVICE_UNAVAILABLE) from error
