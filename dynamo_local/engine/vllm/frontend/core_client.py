"""vLLM's frontend with a dispatcher where its engine core would be.

`AsyncLLM` takes its core from `EngineCoreClient.make_async_mp_client`, a static method, and offers no way to pass
one in. The choices are to copy `AsyncLLM.__init__` into a subclass (and follow every change of it), to imitate an
engine process on the far end of vLLM's private ZMQ handshake, or to replace that one method while the one object is
made. This module does the last, in `build`, and a contract test holds it to the pinned vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.tasks import SupportedTask
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput

from dynamo_local.core.errors import BadRequestError
from dynamo_local.core.http.bounds import RequestBounds
from dynamo_local.core.messages.tokens import TokenDelta
from dynamo_local.core.ports import Dispatcher
from dynamo_local.engine.vllm.frontend.client_errors import drop_clients_errors
from dynamo_local.engine.vllm.frontend.preprocessing import keep_responsive
from dynamo_local.engine.vllm.requests.wire import core_output_of, request_of

_log = logging.getLogger(__name__)


@dataclass
class _Resources:
    """What AsyncLLM reads to learn whether its engine lives. The fleet as a whole is never dead."""

    engine_dead: bool = False


class _Begun(NamedTuple):
    """What vLLM wants to know of a request with each of its outputs, and workers need not tell."""

    prompt_tokens: int
    trace_headers: Mapping[str, str] | None


_UNKNOWN = _Begun(0, None)


class DispatchedCore(EngineCoreClient):
    """An engine-core client whose engine is a fleet."""

    def __init__(self, dispatcher: Dispatcher, *, lora: bool = False) -> None:
        self.resources = _Resources()
        self.engine_ranks_managed = [0]
        self._dispatcher = dispatcher
        self._lora = lora
        self._begun: dict[str, _Begun] = {}
        self._failures: dict[str, Exception] = {}

    async def get_supported_tasks_async(self) -> tuple[SupportedTask, ...]:
        return ("generate",)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        try:
            ours = request_of(request, lora=self._lora)
        except BadRequestError as error:
            raise VLLMClientError(str(error)) from error
        self._begun[request.request_id] = _Begun(len(ours.prompt_token_ids), ours.trace_headers)
        await self._dispatcher.submit(ours)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._begun.pop(request_id, None)
        await self._dispatcher.cancel(request_ids)

    async def get_output_async(self) -> EngineCoreOutputs:
        outputs = await self._dispatcher.outputs()
        translated = [self._translate(delta) for delta in outputs.deltas]
        return EngineCoreOutputs(outputs=translated, timestamp=outputs.timestamp)

    async def add_lora_async(self, lora_request: LoRARequest) -> bool:
        """Nothing to load: each worker has loaded what it is configured with."""
        return True

    async def reset_mm_cache_async(self) -> None:
        """Nothing to reset: multimodal prompts are refused."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing to end: the workers are not this process's."""

    def take_failure(self, request_id: str) -> Exception | None:
        """What a request's client is told of its failure, given once."""
        return self._failures.pop(request_id, None)

    def _translate(self, delta: TokenDelta) -> EngineCoreOutput:
        if delta.finish is None:
            return core_output_of(delta, *self._begun.get(delta.request_id, _UNKNOWN))
        if delta.finish == "error":
            self._failures[delta.request_id] = _exception_of(delta)
        return core_output_of(delta, *self._begun.pop(delta.request_id, _UNKNOWN))


def build(
    vllm_config: VllmConfig,
    dispatcher: Dispatcher,
    *,
    log_stats: bool,
    grammar_timeout_s: float = RequestBounds.grammar_timeout_s,
) -> AsyncLLM:
    """An AsyncLLM before `dispatcher`. Call outside the event loop's thread: it takes a while.

    (Also because AsyncLLM starts its output loop at once where it finds a running event loop, and the loop is to see
    the guarded output processor. It starts with the first request otherwise.)
    """
    core = DispatchedCore(dispatcher, lora=vllm_config.lora_config is not None)
    with _core_taken_from(core):
        llm = AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=not log_stats)
    _isolate_failures(llm.output_processor, core)
    keep_responsive(llm, grammar_timeout_s)
    drop_clients_errors()
    return llm


@contextmanager
def _core_taken_from(core: DispatchedCore) -> Iterator[None]:
    original = EngineCoreClient.make_async_mp_client
    EngineCoreClient.make_async_mp_client = staticmethod(lambda *_, **__: core)  # type: ignore[method-assign]
    try:
        yield
    finally:
        EngineCoreClient.make_async_mp_client = original  # type: ignore[method-assign]


def _isolate_failures(processor: OutputProcessor, core: DispatchedCore) -> None:
    """Have each output processed by itself, so that one that fails is the failure of one request.

    vLLM's output loop ends at the first exception and fails every request there is. A request that failed on its
    worker is ended here too, with the reason, where vLLM would say "Internal server error".
    """
    process = processor.process_outputs

    def process_each(outputs: list[EngineCoreOutput], *args: Any, **kwargs: Any) -> OutputProcessorOutput:
        to_abort: list[str] = []
        for output in outputs:
            failure = core.take_failure(output.request_id)
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


def _exception_of(delta: TokenDelta) -> Exception:
    """What vLLM's server makes the right answer of: 400, 500 or 503, and the cause."""
    why = delta.error or "the request failed"
    if delta.fault == "request":
        return VLLMClientError(why)
    # Not to be sent again as it is, which 503 says of what may do better a little later.
    died = delta.fault == "deaths"
    return GracefulHTTPError(why, HTTPStatus.INTERNAL_SERVER_ERROR if died else HTTPStatus.SERVICE_UNAVAILABLE)


def _end_with_error(processor: OutputProcessor, request_id: str, failure: Exception) -> list[str]:
    """Forget a request, with its siblings if it is one of n, and raise in its `generate`.

    Returns the ids of those that workers may still be busy with.
    """
    state = processor.request_states.get(request_id)
    if state is None or state.queue is None:
        return []
    family = request_id if state.parent_req is None else state.parent_req.request_id
    aborted = processor.abort_requests([family], internal=True)
    # Put last: an exception replaces the "abort" outputs that abort_requests has just put.
    state.queue.put(failure)
    return aborted
