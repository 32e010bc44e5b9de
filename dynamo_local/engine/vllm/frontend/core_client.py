"""vLLM's frontend with a dispatcher in the place of its engine core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import NamedTuple

from msgspec import structs
from vllm.config import CacheConfig, VllmConfig
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.tasks import SupportedTask
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.metrics.loggers import StatLoggerFactory

from dynamo_local.core.errors import BadRequestError
from dynamo_local.core.http.bounds.request import RequestBounds
from dynamo_local.core.messages.work import TokenDelta
from dynamo_local.core.ports import ContextHashes, Dispatcher
from dynamo_local.engine.vllm.kv.identity import BlockHasher
from dynamo_local.engine.vllm.patches.frontend import (
    core_client,
    count_usage,
    drop_clients_errors,
    isolate_failures,
    keep_prompts,
    prepare_concurrently,
)
from dynamo_local.engine.vllm.requests.wire import core_output_of, request_of, tasks_of


@dataclass
class _Resources:
    """State that AsyncLLM reads to learn whether its engine lives. The fleet as a whole is never dead."""

    engine_dead: bool = False


class _Begun(NamedTuple):
    """Facts about a request that vLLM wants with each of its outputs. Workers do not send them."""

    prompt_tokens: int
    trace_headers: Mapping[str, str] | None


_UNKNOWN = _Begun(0, None)


class DispatchedCore(EngineCoreClient):
    """An engine-core client whose engine is a fleet."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        lora: bool = False,
        tasks: tuple[SupportedTask, ...] = ("generate",),
        hashing: Hashing | None = None,
    ) -> None:
        self.resources = _Resources()
        self.engine_ranks_managed = [0]
        self._dispatcher = dispatcher
        self._lora = lora
        self._tasks = tasks
        self.hashing = hashing
        self.adapter_keys: dict[int, str] = {}
        """What workers know adapters by, by vLLM's number; for others it is their name."""
        self._begun: dict[str, _Begun] = {}
        self._failures: dict[str, Exception] = {}

    async def get_supported_tasks_async(self) -> tuple[SupportedTask, ...]:
        return self._tasks

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        try:
            ours = request_of(request, lora=self._lora, adapter_keys=self.adapter_keys)
            if self.hashing is not None:
                ours = structs.replace(ours, hashes=self.hashing.of(request))
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
        translated = [self._translate(delta, outputs.timestamp) for delta in outputs.deltas]
        return EngineCoreOutputs(outputs=translated, timestamp=outputs.timestamp)

    async def add_lora_async(self, lora_request: LoRARequest) -> bool:
        """Do nothing: each worker has loaded the adapters that it is configured with."""
        return True

    async def reset_mm_cache_async(self) -> None:
        """Do nothing: multimodal prompts are refused."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Do nothing: the workers are other services."""

    def take_failure(self, request_id: str) -> Exception | None:
        """Take the error to report to a request's client, if the request has failed. Returns it once."""
        return self._failures.pop(request_id, None)

    def _translate(self, delta: TokenDelta, arrived_at: float) -> EngineCoreOutput:
        if delta.finish is None:
            return core_output_of(delta, arrived_at, *self._begun.get(delta.request_id, _UNKNOWN))
        if delta.finish == "error":
            self._failures[delta.request_id] = _exception_of(delta)
        return core_output_of(delta, arrived_at, *self._begun.pop(delta.request_id, _UNKNOWN))


def build(
    vllm_config: VllmConfig,
    dispatcher: Dispatcher,
    *,
    log_stats: bool,
    log_requests: bool = False,
    loggers: list[StatLoggerFactory] | None = None,
    grammar_timeout_s: float = RequestBounds.grammar_timeout_s,
) -> AsyncLLM:
    """An AsyncLLM before `dispatcher`. Call outside the event loop's thread: it takes a while.

    `loggers`: of statistics, beside vLLM's own. Not to be called by two threads at once.

    (Also because AsyncLLM starts its output loop at once where it finds a running event loop, and the loop is to see
    the guarded output processor. It starts with the first request otherwise.)
    """
    tasks = tasks_of(vllm_config.model_config)
    hashing = Hashing(vllm_config.cache_config)
    core = DispatchedCore(dispatcher, lora=vllm_config.lora_config is not None, tasks=tasks, hashing=hashing)
    with core_client(core):
        llm = AsyncLLM.from_vllm_config(
            vllm_config, stat_loggers=loggers, disable_log_stats=not log_stats, enable_log_requests=log_requests
        )
    count_usage(llm.output_processor)
    keep_prompts(llm.output_processor)
    isolate_failures(llm.output_processor, core.take_failure)
    prepare_concurrently(llm, grammar_timeout_s)
    drop_clients_errors()
    return llm


def _exception_of(delta: TokenDelta) -> Exception:
    """Exception of which vLLM's server makes the right answer: 400, 500 or 503, with the cause."""
    why = delta.error or "the request failed"
    if delta.fault == "request":
        return VLLMClientError(why)
    # Clients send again after 503. A request whose workers have died must not be sent again as it is.
    died = delta.fault == "deaths"
    return GracefulHTTPError(why, HTTPStatus.INTERNAL_SERVER_ERROR if died else HTTPStatus.SERVICE_UNAVAILABLE)


# Hashes of the blocks of requests' contexts, by which a router finds who has them cached.


class Hashing:
    """Makes the hashes of requests of one model. `contents`: by vLLM's number, the names that engines give to adapters
    of a list (requests/lora.py)."""

    def __init__(self, cache_config: CacheConfig) -> None:
        self.contents: dict[int, str] = {}
        self._cache_config = cache_config
        self._hashers: dict[int, BlockHasher] = {}

    def of(self, request: EngineCoreRequest) -> ContextHashes | None:
        """Return what makes the hashes of a request's context. None: nothing cached may be used for it, or the names of
        its adapter in the engines are not known."""
        params = request.sampling_params
        if params is None or params.skip_reading_prefix_cache or not self._cache_config.enable_prefix_caching:
            return None
        adapter = request.lora_request
        if adapter is not None and adapter.lora_int_id in self.contents:
            adapter = LoRARequest(self.contents[adapter.lora_int_id], adapter.lora_int_id, adapter.lora_path)
        salt = request.cache_salt

        def hashes(token_ids: Sequence[int], block_size: int) -> list[bytes]:
            return self._hasher(block_size)(token_ids, salt, adapter)

        return hashes

    def _hasher(self, block_size: int) -> BlockHasher:
        known = self._hashers.get(block_size)
        if known is None:
            known = self._hashers[block_size] = BlockHasher(self._cache_config, block_size)
        return known
