"""A worker's vLLM engine: the engine core in processes of its own, without vLLM's frontend."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from dynamo_local.core.errors import BadRequestError, EngineError, RequestError, one_line
from dynamo_local.core.http.bounds.request import RequestBounds
from dynamo_local.core.messages.kv import PinAnswer, PinQuestion
from dynamo_local.core.messages.presence import EngineInfo, Load
from dynamo_local.core.messages.work import RequestEpoch, Submit, TokenDelta
from dynamo_local.core.ports import Prefix, Progress, PulledPrefix, Step
from dynamo_local.engine.vllm.environment import prepare_environment
from dynamo_local.engine.vllm.frontend.grammar_threads import TIMEOUT_ENV
from dynamo_local.engine.vllm.kv.cache_changes import ask_for_changes, changes_of
from dynamo_local.engine.vllm.kv.pull.host import PullHost, open_pull
from dynamo_local.engine.vllm.kv.pull.messages import Warm
from dynamo_local.engine.vllm.launch import NO_TRANSFER, Launched, launch
from dynamo_local.engine.vllm.parking import tell, trim_heap
from dynamo_local.engine.vllm.processes import (
    EngineProcesses,
    EngineThreads,
    SoftBinding,
    soft_binding,
    watch_processes,
)
from dynamo_local.engine.vllm.settings import ListAdapters, VllmSettings
from dynamo_local.process.forkserver.prepared.orders import PreparedOrder
from dynamo_local.sdk.config.schema import build_settings
from dynamo_local.tasks import TaskGuard
from state.machine.processes import descendants
from state.remains import SEGMENTS_ENV, record_segments

_log = logging.getLogger(__name__)

_GONE_S = 5.0
"""Deadline for killed processes to be gone, with their devices' memory. Only a driver that hangs needs as long."""


@dataclass
class _Live:
    current: RequestEpoch
    position: int
    hold_s: float = 0.0
    pulling: bool = False
    """Blocks of another engine may still be read for it."""
    stays: int = 0
    """Tokens of its context at the start, if it is to wait for more when it has finished; otherwise 0."""
    adapter: int = 0
    """Number of its LoRA adapter in this engine; 0 without one."""


class VllmEngine:
    """Implements `core.ports.Engine`.

    `config` holds keys of `arguments.engine_schema()` and `adapter_schema()`; others are ignored. `private_dir`: see
    environment.py. `kv_transfer`: whether KV blocks can be pulled from this engine, and by it, as far as its model
    allows that. `grammar_timeout_s`: time for a grammar to compile. `tasks`: a task that fails there ends the worker.
    `listed`: LoRA adapters that are loaded when a request asks for one. `parks`: whether it is to be able to park on a
    GPU, too. `bus_host`: this machine's address on a bus of TLS, where others can read KV on a stream.
    """

    def __init__(
        self,
        config: dict[str, Any],
        private_dir: Path,
        *,
        kv_transfer: bool = False,
        grammar_timeout_s: float = RequestBounds.grammar_timeout_s,
        tasks: TaskGuard | None = None,
        listed: ListAdapters | None = None,
        parks: bool = False,
        bus_host: str = "",
    ) -> None:
        self._bus_host = bus_host
        self._tasks = tasks or TaskGuard()
        self._threads = EngineThreads()
        self._binding: SoftBinding | None = None
        self._config = config
        self._private_dir = private_dir
        self._kv_transfer = kv_transfer
        self._grammar_timeout_s = grammar_timeout_s
        self._listed = listed
        self._parks = parks
        self._pull: PullHost | None = None
        self._live: dict[str, _Live] = {}
        self._names: dict[RequestEpoch, str] = {}
        """Names in the engine core of requests that have grown from a warm request, and have its name."""
        self._warm: dict[RequestEpoch, Warm] = {}
        """Warm requests that have finished, and wait for more input."""
        self._held: dict[str, float] = {}
        """Finished requests whose blocks are held, each with the time of its end (CLOCK_MONOTONIC)."""
        # One thread for the engine's whole life: its processes are forked from it, and the kernel kills them when the
        # thread that forked them ends (process/ancestry.py).
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm-engine")
        self._core: Any = None
        self._processes: EngineProcesses | None = None
        self._adapters: Any = None
        self._no_transfer: str | None = NO_TRANSFER
        self._max_model_len = 0
        self._supported: Any = ()
        """The engine's tasks, in vLLM's words."""
        self._forgotten: tuple[str, ...] = ()

    async def start(self, progress: Progress) -> EngineInfo:
        prepare_environment(self._private_dir)
        os.environ[TIMEOUT_ENV] = f"{self._grammar_timeout_s:g}"
        try:
            launched = await self._launch(progress)
            self._core, self._adapters, self._no_transfer = launched.core, launched.adapters, launched.no_transfer
            await self._adapters.load(self._core)
            questions = ask_for_changes(self._core), self._core.get_supported_tasks_async()
            no_events, self._supported = await asyncio.gather(*questions)
            if launched.identity is not None:
                await self._open_pull(launched, launched.identity)
        except EngineError:
            raise
        except (Exception, SystemExit) as error:
            # vLLM has no error tree for start-up, and its argument parser exits.
            raise EngineError(f"vLLM cannot start: {one_line(error)}", "the worker's log has the details") from error
        self._processes = watch_processes(self._core)
        if no_events is not None:
            _log.info("this engine does not tell which blocks it has cached: %s", no_events)
        info = self._info(launched, kv_events=no_events is None)
        self._tasks.spawn("after the start", asyncio.to_thread(self._note, launched.weights))
        self._max_model_len, self._forgotten = info.max_model_len, info.forgotten
        return info

    def _info(self, launched: Launched, *, kv_events: bool) -> EngineInfo:
        """Describe the engine that has started: vLLM's client has written its own figures into the configuration."""
        from dynamo_local.engine.vllm.requests.continuing import forgotten

        vllm_config = launched.vllm_config
        return EngineInfo(
            engine="vllm",
            model=vllm_config.model_config.served_model_name,
            max_model_len=vllm_config.model_config.max_model_len,
            block_size=vllm_config.cache_config.block_size,
            kv_blocks=vllm_config.cache_config.num_gpu_blocks,
            max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
            no_transfer=self._no_transfer,
            forgotten=forgotten(vllm_config),
            block_bytes=None if self._pull is None else self._pull.block_bytes,
            tasks=tuple(self._supported),
            kv_events=kv_events,
            kv_network=launched.far.network if self._no_transfer is None else "",
        )

    def _note(self, weights: PreparedOrder | None) -> None:
        """Record what the start has made. The first request does not wait for it."""
        # Native libraries name their shared memory themselves, so its names are known only now (Python's:
        # patches/forks.py). It is removed after the engine's processes have been killed.
        if SEGMENTS_ENV in os.environ:
            record_segments(self._private_dir, descendants(os.getpid()))
        if weights is not None:
            from dynamo_local.engine.vllm.weights import order_prepared

            order_prepared(weights)

    async def _open_pull(self, launched: Launched, identity: Mapping[str, str]) -> None:
        self._pull = await open_pull(launched.core, launched.vllm_config, launched.adapters, identity)
        self._no_transfer = self._pull.unsupported
        if self._no_transfer is not None:
            _log.warning("this engine transfers no KV: %s", self._no_transfer)

    async def _launch(self, progress: Progress) -> Launched:
        if build_settings(VllmSettings, "the engine", self._config).cpu_tuning:
            self._binding = soft_binding(self._threads, lambda: bool(self._live))
        with ExitStack() as stack:
            if self._binding is not None:
                stack.enter_context(self._binding.starting(self._tasks))
            how = (
                self._config,
                self._kv_transfer,
                self._threads,
                self._binding,
                self._listed,
                self._parks,
                self._bus_host,
            )
            launched = partial(launch, *how, progress)
            return await asyncio.get_running_loop().run_in_executor(self._thread, launched)

    async def submit(self, work: Submit, pulled: PulledPrefix | None = None) -> None:
        await self._add(work, pulled)

    async def warm(self, work: Submit, pulled: PulledPrefix | None = None) -> None:
        # vLLM keeps what waits for more input as it is; a hold would be of full blocks only.
        await self._add(msgspec.structs.replace(work, hold_s=0.0), pulled, stays=True)

    async def grow(self, work: Submit, from_warm: RequestEpoch, *, warm: bool = False) -> bool:
        from dynamo_local.engine.vllm.requests.wire import can_grow

        kept = self._warm.get(from_warm)
        if kept is None or self._pull is None or len(work.token_ids) >= self._max_model_len:
            return False
        if not can_grow(work.sampling) or (work.hold_s > 0 and not warm):
            return False
        del self._warm[from_warm]
        current = RequestEpoch(work.request_id, work.epoch)
        stays = len(work.token_ids) if warm else 0
        self._begin(kept.name, _Live(current, work.position, stays=stays, adapter=kept.adapter))
        self._names[current] = kept.name
        grown = await self._pull.grow(kept, work, stays=warm)
        if not grown:
            # The request of that name in the engine core is not the one that it was taken for.
            await self.cancel([current])
        return grown

    async def _add(self, work: Submit, pulled: PulledPrefix | None, *, stays: bool = False) -> None:
        from dynamo_local.engine.vllm.requests.wire import core_request_of

        if len(work.token_ids) + (not work.pools) > self._max_model_len:
            # The frontend goes by the model's configuration; an engine may have settled for less, by its memory. (If it
            # is to prefill for another one, or comes from another one, that one has more.)
            why = f"{len(work.token_ids)} tokens leave no room for an answer in this worker's {self._max_model_len}"
            raise RequestError(why) if work.hold_s > 0 or work.position > 0 else BadRequestError(why)
        await self._obtain_adapter(work.adapter)
        transfer = self._pull.params_of(work, pulled) if self._pull is not None else None
        request = core_request_of(
            work, transfer, self._forgotten, adapters=self._adapters, stays=stays, tasks=self._supported
        )
        current = RequestEpoch(work.request_id, work.epoch)
        kept = len(work.token_ids) if stays else 0
        number = 0 if request.lora_request is None else request.lora_request.lora_int_id
        self._begin(request.request_id, _Live(current, work.position, work.hold_s, pulled is not None, kept, number))
        await self._core.add_request_async(request)

    async def _obtain_adapter(self, name: str | None) -> None:
        """Load the adapter if it is one of the list that has not been loaded, or has changed."""
        obtained = await self._adapters.obtain(name, self._core, self._adapters_in_use)
        # Nothing is awaited from here until the request is noted as one that uses the adapter.
        if name is not None and obtained is not None and self._pull is not None:
            self._pull.know_adapter(name, obtained)

    def _adapters_in_use(self) -> set[int]:
        return {live.adapter for live in self._live.values()} | {kept.adapter for kept in self._warm.values()}

    def _used_no_more(self, adapters: set[int]) -> None:
        if any(adapters):
            self._adapters.request_ended()

    def _begin(self, name: str, live: _Live) -> None:
        self._live[name] = live
        if self._binding is not None:
            self._binding.wake()

    async def cancel(self, requests: Sequence[RequestEpoch]) -> None:
        names = [str(request) for request in requests]
        dropped = {name: live for request in requests for name, live in self._take_out(request)}
        warm_kept = [kept for request in requests if (kept := self._warm.pop(request, None)) is not None]
        warm = [kept.name for kept in warm_kept]
        if dropped or warm:
            await self._core.abort_requests_async([*dropped, *warm])
            self._used_no_more({live.adapter for live in dropped.values()} | {kept.adapter for kept in warm_kept})
        # One that was running here may have finished, and be held, in the engine core.
        held = [name for name in names if self._held.pop(name, None) or (name in dropped and dropped[name].hold_s > 0)]
        if self._pull is not None and held:
            self._pull.release(holds=held)
        if self._pull is not None and any(live.pulling for live in dropped.values()):
            # The caller may unpin next, which it must not before the engine core has given up these reads.
            await self._pull.settle()

    def _take_out(self, request: RequestEpoch) -> list[tuple[str, _Live]]:
        """Remove a request that is under way. Returns it by its name in the engine core."""
        name = self._names.pop(request, str(request))
        live = self._live.get(name)
        if live is None or live.current != request:
            return []
        return [(name, self._live.pop(name))]

    def prefix(self, token_ids: Sequence[int], cache_salt: str | None, adapter: str | None) -> Prefix | None:
        return None if self._pull is None else self._pull.prefix(token_ids, cache_salt, adapter)

    async def cached(self, prefix: Prefix) -> int:
        return 0 if self._pull is None else await self._pull.cached(prefix)

    async def pin(self, question: PinQuestion) -> PinAnswer:
        if self._pull is None:
            return PinAnswer(blocks=0, refused=self._no_transfer)
        return await self._pull.pin(question)

    async def unpin(self, pins: Sequence[str]) -> None:
        if self._pull is not None:
            self._pull.release(pins=pins)

    async def confirm(self, pin: str) -> bool:
        return self._pull is not None and await self._pull.confirm(pin)

    async def read_ended(self, pin: str) -> bool:
        return self._pull is not None and await self._pull.read_ended(pin)

    async def settle_read(self, pin: str, *, held: bool) -> None:
        if self._pull is not None:
            await self._pull.settle_read(pin, held=held)

    async def step(self) -> Step:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            outputs = await self._core.get_output_async()
        except EngineDeadError as error:
            raise EngineError("vLLM's engine process died", "the worker's log has the details") from error
        stamped = (self._stamp(output, outputs.timestamp) for output in outputs.outputs)
        deltas = tuple(delta for delta in stamped if delta is not None)
        stats = outputs.scheduler_stats
        return Step(outputs.timestamp, deltas, self._load(stats), changes_of(stats))

    async def park(self, deadline_s: float) -> None:
        if self._live or self._warm:
            raise EngineError("the engine has requests")
        await tell(self._core, "park", deadline_s)
        await asyncio.to_thread(trim_heap)

    async def wake(self, deadline_s: float) -> None:
        await tell(self._core, "wake", deadline_s)

    async def waited_s(self) -> float:
        return await asyncio.to_thread(self._threads.waited_s)

    async def close(self, deadline_s: float) -> None:
        if self._binding is not None:
            self._binding.close()
        if self._processes is not None:
            self._processes.forget()
        if self._pull is not None:
            self._pull.close()
        if self._core is not None:
            core, self._core = self._core, None
            # Longer than what follows takes: in the end vLLM would kill the resource trackers, too.
            ending = asyncio.get_running_loop().run_in_executor(self._thread, core.shutdown, deadline_s + _GONE_S)
            if self._processes is not None:
                await asyncio.wait((ending,), timeout=deadline_s)
                await self._processes.kill(_GONE_S)
                self._processes.close()
            await ending
        self._thread.shutdown(wait=False)

    def _load(self, stats: Any) -> Load | None:
        from dynamo_local.engine.vllm.requests.wire import load_of

        return load_of(stats, keeps=self._pull is not None, warm=len(self._warm))

    def _stamp(self, output: Any, ended_at: float) -> TokenDelta | None:
        from dynamo_local.engine.vllm.requests.wire import delta_of

        live = self._live.get(output.request_id)
        if live is None:
            return None
        delta = delta_of(output, live.current, live.position, ended_at)
        live.position += len(delta.token_ids)
        live.pulling = False
        if delta.finish is not None:
            del self._live[output.request_id]
            self._names.pop(live.current, None)
            if live.stays and delta.finish in ("length", "stop"):
                self._warm[live.current] = Warm(output.request_id, live.stays, live.adapter)
            self._used_no_more({live.adapter})
            if live.hold_s > 0 and self._pull is not None:
                self._hold(self._pull, output.request_id, live.hold_s)
        return delta

    def _hold(self, pull: PullHost, name: str, hold_s: float) -> None:
        now = time.monotonic()
        self._held = {other: end for other, end in self._held.items() if end > now}
        self._held[name] = now + hold_s
        pull.watch(now + hold_s)
