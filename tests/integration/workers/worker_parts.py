"""The engine service and the router, each on a connection of its own, without the process around them."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from components.router import Router
from components.workers.engine_service import EngineService
from components.workers.prefill_service import CLAIM_S, PrefillService
from components.workers.requests.sender import RESEND_AFTER_S
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import Announcer
from dynamo_local.core.messages.kv import PinAnswer, PinQuestion
from dynamo_local.core.messages.presence import EngineInfo, Presence
from dynamo_local.core.messages.work import RequestEpoch, Submit
from dynamo_local.core.names import Watcher
from dynamo_local.core.ports import Engine, Prefix, Progress, PulledPrefix, Step
from dynamo_local.core.subjects import Subjects
from dynamo_local.process.context import ServiceContext
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService
from dynamo_local.tasks import TaskGuard

SCRIPTED_BLOCK_SIZE = 4


_indexes = itertools.count(1)


def context_of(bus: Bus, subjects: Subjects, service: str, role: str, lease: str) -> ServiceContext:
    watcher = Watcher.of(subjects.namespace, service, next(_indexes), subjects.revision)
    presence = Presence(str(watcher), service, role, lease, 1, "starting", revision=subjects.revision)
    resolved = ResolvedService(service, f"components:{service}", role, 1, 0, 0.0, {}, {}, ())
    return ServiceContext(
        watcher=watcher,
        revision=subjects.revision,
        lease=lease,
        graph=ResolvedGraph(resolved.target, subjects.namespace, (resolved,)),
        service=resolved,
        bus=bus,
        announcer=Announcer(bus, subjects, presence),
        private_dir=Path(tempfile.gettempdir()),
        tasks=TaskGuard(),
    )


@dataclass
class Part:
    """A service that announces itself and has tasks."""

    context: ServiceContext

    @property
    def lease(self) -> str:
        return self.context.lease

    async def announce(self, state: str) -> None:
        self.context.announcer.update(state=state)
        await self.context.announcer.announce()

    async def close(self) -> None:
        """End all tasks. Fails if one of them has failed, or does not end."""
        failed = asyncio.create_task(self.context.tasks.failed())
        await asyncio.sleep(0)
        assert not failed.done(), failed.exception()
        failed.cancel()
        left = await self.context.tasks.close()
        assert left == [], left


@dataclass
class Worker(Part):
    """An engine with its service. Its presence is announced at every beat, unless a test ends that."""

    engine: Engine
    resend_after_s: float = RESEND_AFTER_S
    service: EngineService = field(init=False)

    def __post_init__(self) -> None:
        self.service = EngineService(
            self.context, self.engine, frontend_grace_s=0.0, resend_after_s=self.resend_after_s
        )

    async def start(self) -> Self:
        info = await self.engine.start(lambda _: None)
        self.context.announcer.update(engine=info)
        await self.service.start()
        self.context.announcer.update(state="ready")
        self.context.tasks.spawn("presence", self.context.announcer.run())
        return self


@asynccontextmanager
async def serving(context: ServiceContext, engine: Engine) -> AsyncIterator[Worker]:
    """A worker that can be asked."""
    worker = await Worker(context, engine).start()
    await context.bus.flush()
    yield worker
    await worker.close()


async def start_router(context: ServiceContext) -> Part:
    router = Router(context)
    await router.start()
    await context.bus.flush()
    part = Part(context)
    await part.announce("ready")
    return part


@dataclass
class PrefillPart(Worker):
    """A worker that takes prefill jobs, too, unless it is told otherwise."""

    batch: int = 4
    claim_s: float = CLAIM_S
    prefill: PrefillService = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.prefill = PrefillService(self.context, self.service, self.batch, self.claim_s)


@dataclass
class ScriptedEngine:
    """An engine that does what a test says. Implements `core.ports.Engine`."""

    submitted: asyncio.Queue[Submit] = field(default_factory=asyncio.Queue)
    pulled: asyncio.Queue[PulledPrefix | None] = field(default_factory=asyncio.Queue)
    """The pulled prefixes that came with submissions."""
    cancelled: asyncio.Queue[RequestEpoch] = field(default_factory=asyncio.Queue)
    steps: asyncio.Queue[Step] = field(default_factory=asyncio.Queue)
    asked_to_pin: asyncio.Queue[PinQuestion] = field(default_factory=asyncio.Queue)
    unpinned: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    pulls: Prefix | None = None
    has: int = 0
    """Number of cached blocks of any prefix."""
    lends: PinAnswer = field(default_factory=lambda: PinAnswer(0, refused="this engine lends nothing"))
    submit_raises: Exception | None = None
    pin_raises: Exception | None = None
    cached_raises: Exception | None = None
    no_transfer: str | None = None
    kv_network: str = ""
    asked_to_confirm: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    holds: bool = True
    """Pins are held until they are confirmed."""
    reads: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by a test when what is to be confirmed has been read."""
    settled: asyncio.Queue[tuple[str, bool]] = field(default_factory=asyncio.Queue)
    waited_for_core_s: float = 0.0
    grows: bool = False
    grown: asyncio.Queue[RequestEpoch] = field(default_factory=asyncio.Queue)
    """Warm requests that others have grown from."""
    admits: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared by a test, submissions wait."""

    parks: asyncio.Queue[bool] = field(default_factory=asyncio.Queue)
    """Calls of `park` (True) and `wake` (False)."""
    park_raises: Exception | None = None
    wake_raises: Exception | None = None
    pauses: asyncio.Event = field(default_factory=asyncio.Event)
    wakes: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared by a test, calls of `park` or `wake` wait."""

    def __post_init__(self) -> None:
        self.admits.set()
        self.pauses.set()
        self.wakes.set()

    async def start(self, progress: Progress) -> EngineInfo:
        return EngineInfo(
            "scripted", "model", 100, SCRIPTED_BLOCK_SIZE, 100, 10, self.no_transfer, kv_network=self.kv_network
        )

    async def submit(self, work: Submit, pulled: PulledPrefix | None = None) -> None:
        if self.submit_raises is not None:
            raise self.submit_raises
        self.submitted.put_nowait(work)
        self.pulled.put_nowait(pulled)
        await self.admits.wait()

    async def warm(self, work: Submit, pulled: PulledPrefix | None = None) -> None:
        await self.submit(work, pulled)

    async def grow(self, work: Submit, from_warm: RequestEpoch, *, warm: bool = False) -> bool:
        if self.grows:
            self.submitted.put_nowait(work)
            self.grown.put_nowait(from_warm)
            await self.admits.wait()
        return self.grows

    async def cancel(self, requests: Sequence[RequestEpoch]) -> None:
        for request in requests:
            self.cancelled.put_nowait(request)

    def prefix(self, token_ids: Sequence[int], cache_salt: str | None, adapter: str | None) -> Prefix | None:
        return self.pulls

    async def cached(self, prefix: Prefix) -> int:
        if self.cached_raises is not None:
            raise self.cached_raises
        return self.has

    async def pin(self, question: PinQuestion) -> PinAnswer:
        self.asked_to_pin.put_nowait(question)
        if self.pin_raises is not None:
            raise self.pin_raises
        return self.lends

    async def unpin(self, pins: Sequence[str]) -> None:
        for pin in pins:
            self.unpinned.put_nowait(pin)

    async def confirm(self, pin: str) -> bool:
        self.asked_to_confirm.put_nowait(pin)
        return self.holds

    async def read_ended(self, pin: str) -> bool:
        await self.reads.wait()
        return True

    async def settle_read(self, pin: str, *, held: bool) -> None:
        self.settled.put_nowait((pin, held))

    async def step(self) -> Step:
        return await self.steps.get()

    async def park(self, deadline_s: float) -> None:
        self.parks.put_nowait(True)
        await self.pauses.wait()
        if self.park_raises is not None:
            raise self.park_raises

    async def wake(self, deadline_s: float) -> None:
        self.parks.put_nowait(False)
        await self.wakes.wait()
        if self.wake_raises is not None:
            raise self.wake_raises

    async def waited_s(self) -> float:
        return self.waited_for_core_s

    async def close(self, deadline_s: float) -> None:
        """Nothing to close."""
