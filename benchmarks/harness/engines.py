"""vLLM engines in the hands of a benchmark, without workers, bus and HTTP: each as a worker starts it, on one core."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from benchmarks.harness.accounting import Process, descendants
from benchmarks.harness.servers import ENGINE_ENVIRONMENT, ServerError, engine_settings
from dynamo_local.core.errors import EngineError
from dynamo_local.core.messages.work import Submit, TokenDelta
from dynamo_local.core.ports import PulledPrefix
from dynamo_local.engine.vllm.engine import VllmEngine
from state.devices.allocation import CPU_CORES_VARIABLE

_PATIENCE_S = 120.0
_END_WITHIN_S = 10.0
_BOUND_ENV = "VLLM_CPU_OMP_THREADS_BIND"


@dataclass
class Request:
    """A request, and when its tokens came. Times are those of `time.monotonic`."""

    sent_at: float
    done: asyncio.Future[None]
    times: list[float] = field(default_factory=list)
    """When each token came."""
    cached_tokens: int | None = None

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.times[0] - self.sent_at


class BenchEngine:
    """An engine. An async context manager."""

    def __init__(self, name: str, scratch: Path, model: str, core: int, *, kv_transfer: bool, **config: Any) -> None:
        self.name = name
        self.processes: tuple[Process, ...] = ()
        self._private_dir = scratch / name
        settings: Mapping[str, Any] = {**engine_settings(model), "model": model, **config}
        self.engine = VllmEngine(dict(settings), self._private_dir, kv_transfer=kv_transfer)
        self._core = core
        self._requests: dict[str, Request] = {}
        self._count = 0
        self._pump: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._private_dir.mkdir(mode=0o700, parents=True)
        os.environ.update(ENGINE_ENVIRONMENT)
        # As a worker's device claim sets it. vLLM's own setting is derived from it, once for each engine.
        os.environ[CPU_CORES_VARIABLE] = str(self._core)
        os.environ.pop(_BOUND_ENV, None)
        known = set(descendants(os.getpid()))
        await self.engine.start(lambda _: None)
        self.processes = tuple(process for process in descendants(os.getpid()) if process not in known)
        self._pump = asyncio.create_task(self._take_steps(), name=f"steps of {self.name}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wake()
        if self._pump is not None:
            self._pump.cancel()
            with suppress(asyncio.CancelledError):
                await self._pump
        await self.engine.close(_END_WITHIN_S)

    def pause(self) -> None:
        """Stop its processes where they are, so that they use no CPU at all."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._signal(signal.SIGCONT)

    async def run(self, tokens: Sequence[int], count: int, pulled: PulledPrefix | None = None) -> Request:
        """Exactly `count` greedy tokens. Raises ServerError if that takes too long or fails."""
        self._count += 1
        name = f"{self.name}-{self._count}"
        request = self._requests[name] = Request(0.0, asyncio.get_running_loop().create_future())
        sampling = {"max_tokens": count, "temperature": 0.0, "ignore_eos": True}
        work = Submit(
            request_id=name,
            epoch=1,
            frontend="bench",
            token_ids=list(tokens),
            sampling=msgspec.Raw(msgspec.msgpack.encode(sampling)),
        )
        request.sent_at = time.monotonic()
        await self.engine.submit(work, pulled)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await request.done
        except TimeoutError as error:
            raise ServerError(f"engine {self.name} did not end a request within {_PATIENCE_S:g} s") from error
        return request

    async def _take_steps(self) -> None:
        try:
            while True:
                step = await self.engine.step()
                now = time.monotonic()
                for delta in step.deltas:
                    self._note(delta, now)
        except EngineError as error:
            for request in self._requests.values():
                if not request.done.done():
                    request.done.set_exception(ServerError(f"engine {self.name} died: {error}"))

    def _note(self, delta: TokenDelta, now: float) -> None:
        request = self._requests[delta.request_id]
        request.times += [now] * len(delta.token_ids)
        if request.cached_tokens is None:
            request.cached_tokens = delta.cached_tokens
        if delta.finish is not None:
            del self._requests[delta.request_id]
            if delta.finish == "error":
                request.done.set_exception(ServerError(f"engine {self.name}: {delta.error}"))
            else:
                request.done.set_result(None)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)
