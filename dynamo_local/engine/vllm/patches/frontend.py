"""vLLM's OpenAI server in the frontend's process: its engine-core client, its outputs, its preparation of requests, its
log. Imports vLLM."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import JSONResponse
from vllm.entrypoints.serve.tokenize import api_router as tokenize_router
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput, RequestState

from dynamo_local.core.usage.records import Tally
from dynamo_local.engine.vllm.frontend.grammar_threads import (
    GrammarThreads,
    GrammarThreadsBusyError,
    GrammarTimeoutError,
    yield_to_others,
)
from dynamo_local.engine.vllm.frontend.request_context import current_request
from dynamo_local.engine.vllm.patches.table import applies

# `AsyncLLM` with an engine-core client of ours.
#
# `AsyncLLM` takes its client from `EngineCoreClient.make_async_mp_client`, a static method, and offers no way to pass
# one in. The choices are to copy `AsyncLLM.__init__` into a subclass (and follow every change of it), to imitate an
# engine process on the far end of vLLM's private ZMQ handshake, or to replace that one method while the one object is
# made. This does the last.


@contextmanager
def core_client(client: EngineCoreClient) -> Iterator[None]:
    """Give an AsyncLLM that is made within this client."""
    original = EngineCoreClient.make_async_mp_client
    EngineCoreClient.make_async_mp_client = staticmethod(lambda *_, **__: client)  # type: ignore[method-assign]
    try:
        yield
    finally:
        EngineCoreClient.make_async_mp_client = original  # type: ignore[method-assign]


# Outputs of a step are processed one by one, so that one that fails is the failure of one request.
#
# vLLM's output loop ends at the first exception and fails every request there is. A request that failed on its worker
# is ended here too, with the reason, where vLLM would say "Internal server error".

_log = logging.getLogger(__name__)


def isolate_failures(processor: OutputProcessor, take_failure: Callable[[str], Exception | None]) -> None:
    """Replace `process_outputs` of this processor. `take_failure` gives, once, the error of a request that failed."""
    process = processor.process_outputs

    def process_each(outputs: list[EngineCoreOutput], *args: Any, **kwargs: Any) -> OutputProcessorOutput:
        to_abort: list[str] = []
        for output in outputs:
            failure = take_failure(output.request_id)
            if failure is None:
                try:
                    to_abort += process([output], *args, **kwargs).reqs_to_abort
                    continue
                except Exception:  # noqa: BLE001  # vLLM promises nothing about what it raises here
                    _log.exception("output of request %s could not be processed", output.request_id)
                    why = "the answer of the engine could not be processed"
                    failure = GracefulHTTPError(why, HTTPStatus.SERVICE_UNAVAILABLE)
            to_abort += _end_with_error(processor, output.request_id, failure)
        return OutputProcessorOutput(request_outputs=[], reqs_to_abort=to_abort)

    processor.process_outputs = process_each  # type: ignore[method-assign,assignment]


def _end_with_error(processor: OutputProcessor, request_id: str, failure: Exception) -> list[str]:
    """Forget a request, with its siblings if it is one of n, and raise `failure` in its `generate`.

    Returns the ids of the requests that workers may still be busy with.
    """
    state = processor.request_states.get(request_id)
    if state is None or state.queue is None:
        return []
    family = request_id if state.parent_req is None else state.parent_req.request_id
    aborted = processor.abort_requests([family], internal=True)
    # Put last: an exception replaces the "abort" outputs that abort_requests has just put.
    state.queue.put(failure)
    return aborted


# Tokens are counted where vLLM makes outputs of them, for the HTTP request that they belong to.
#
# This is the one place through which the tokens of all APIs pass, each once: behind it, migrated and recovered requests
# are one, and what a stop string has cut off is gone; before it, a client may be gone, and its answer not be read.

_TALLY = "dynamo_tally"


def count_usage(processor: OutputProcessor) -> None:
    """Replace `add_request` and `process_outputs` of this processor."""
    add, process = processor.add_request, processor.process_outputs
    states = processor.request_states

    def add_counted(request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
        add(request, *args, **kwargs)
        # Called in the context of the HTTP request; outputs are processed in none.
        context, state = current_request.get(), states.get(request.request_id)
        if context is not None and context.tally is not None and state is not None:
            setattr(state, _TALLY, context.tally)
            context.tally.begin()

    def process_counted(outputs: list[EngineCoreOutput], *args: Any, **kwargs: Any) -> OutputProcessorOutput:
        # A finished request has no state afterwards, and before that there may be tokens that are cut off.
        found = [(output, states.get(output.request_id)) for output in outputs]
        processed = process(outputs, *args, **kwargs)
        for output, state in found:
            tally: Tally | None = getattr(state, _TALLY, None)
            if state is not None and tally is not None:
                tally.add(_prompt_id(state), state.prompt_len, state.num_cached_tokens, len(output.new_token_ids))
                if state.request_id not in states:
                    tally.end()
        return processed

    processor.add_request = add_counted  # type: ignore[method-assign]
    processor.process_outputs = process_counted  # type: ignore[method-assign,assignment]


def _prompt_id(state: RequestState) -> str:
    """The same for all choices of a prompt."""
    return state.request_id if state.parent_req is None else state.parent_req.request_id


# An answer that is kept goes on with the prompt that it was begun with, although vLLM renders it once more.
#
# A chat template that prints the date renders another prompt on another day. The tokens are replaced before vLLM makes
# its state of the request, so that its detokenizer, its counts and the engines have the same prompt.

_TOKENS_COMPARED = 1000
"""Tokens of a vocabulary, spread over it, by which it is told from others."""


def keep_prompts(processor: OutputProcessor) -> None:
    """Replace `add_request` of this processor."""
    add = processor.add_request
    vocabulary = cache(lambda: _digest(processor.tokenizer))

    def add_kept(request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
        context = current_request.get()
        if context is not None and context.kept_prompt is not None and request.prompt_token_ids is not None:
            request.prompt_token_ids = list(context.kept_prompt(request.prompt_token_ids, vocabulary()))
        add(request, *args, **kwargs)

    processor.add_request = add_kept  # type: ignore[method-assign]


def _digest(tokenizer: Any) -> str:
    """Return a digest of a tokenizer's vocabulary; empty without a tokenizer."""
    if tokenizer is None:
        return ""
    size = len(tokenizer)
    some = tokenizer.convert_ids_to_tokens(list(range(0, size, max(1, size // _TOKENS_COMPARED))))
    return hashlib.sha256(repr((size, some)).encode()).hexdigest()


# Preparation of requests in vLLM's server, so that no request holds up the others.
#
# - *Long texts* are tokenized by a thread of their own. vLLM has one for all, in which each waits for those before it.
# - *Many tokens* are written as JSON by msgspec, sixteen times as fast as by Python's own encoder, which keeps all
#   other threads waiting.
# - *Grammars* are checked in threads, with a deadline, and not by the event loop itself. vLLM checks them again where
#   it always has; that check is answered with what the thread has found.
# - *Token ids* that the model does not have are refused before anything of their request is begun. vLLM looks at each
#   prompt when its turn comes, which may be after the first token of another one.

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


# vLLM's log in a frontend: requests are written to it on demand, and errors of clients never are.
#
# A client whose request is refused has been told, and the server has no problem. vLLM logs a traceback of several
# kilobytes for a request that it refuses while it streams.

_OF_REQUESTS = ("vllm.entrypoints.serve.utils.request_logger", "vllm.v1.engine.async_llm")


def show_requests() -> None:
    """Have vLLM's log hold requests and outputs, which are of level INFO. Of all else it holds what it held before."""
    for name in _OF_REQUESTS:
        logging.getLogger(name).setLevel(logging.INFO)
    for handler in logging.getLogger("vllm").handlers:
        handler.setLevel(min(handler.level, logging.INFO))


def drop_clients_errors() -> None:
    """Filter vLLM's log in this process. A second call changes nothing."""
    for handler in logging.getLogger("vllm").handlers:
        if not any(isinstance(known, ClientErrors) for known in handler.filters):
            handler.addFilter(ClientErrors())


class ClientErrors(logging.Filter):
    """Passes everything but tracebacks of errors that are a client's, or that were answered on purpose."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, VLLMClientError | GracefulHTTPError)
