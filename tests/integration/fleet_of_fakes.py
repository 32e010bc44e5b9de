"""A frontend's dispatcher on a real bus, and workers that do what a test tells them to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from components.frontend.dispatcher import BusDispatcher
from components.frontend.placing import Assigner, LocalAssigner
from components.frontend.prefill import PrefillJobs
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import TICK_S, FleetWatch
from dynamo_local.core.fleet.view import Change
from dynamo_local.core.messages.kv import CachedAnswer, CachedQuestion
from dynamo_local.core.messages.presence import Exclusive, LeaseRevoked, Presence, ProcessState
from dynamo_local.core.messages.work import (
    AskExclusive,
    Cancel,
    EndExclusive,
    Progress,
    RequestEpoch,
    Resend,
    Submit,
    TokenBatch,
    TokenDelta,
    Work,
)
from dynamo_local.core.ports import Request
from dynamo_local.core.request.recovery import RecoveryDeadlines
from dynamo_local.core.subjects import Subjects
from dynamo_local.tasks import TaskGuard

DEADLINE_S = 60.0
PATIENT = RecoveryDeadlines(
    placement_s=DEADLINE_S, recovery_s=DEADLINE_S, silence_s=3600.0, ask_again_s=0.02, gap_s=0.0, fruitless_epochs=5
)
"""Of a frontend that does not ask after its requests by itself."""
SAMPLING = msgspec.msgpack.encode({"max_tokens": 8})
NO_PROCESS = 1 << 22
"""More than any pid. A process that is there could be found waiting for a core, which excuses its silence."""


def request(request_id: str = "r1", prompt: tuple[int, ...] = (1, 2, 3), **more: Any) -> Request:
    return Request(request_id, list(prompt), more.pop("sampling", _sampling), arrival_time=1.0, **more)


def _sampling(position: int, at_most: int | None = None) -> bytes:
    return SAMPLING if at_most is None else msgspec.msgpack.encode({"max_tokens": at_most})


async def until(condition: Callable[[], bool]) -> None:
    """For what others do and no event tells of."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class FakeWorker:
    """Takes work and waits to be told what to send."""

    def __init__(
        self, bus: Bus, subjects: Subjects, lease: str, *, watcher: str | None = None, role: str = "aggregated"
    ) -> None:
        self.lease = lease
        self.cached = 0
        """What it tells that it has cached, of whatever prompt."""
        self.ends = 0
        """How often it was told that it need not be set apart any more."""
        self.deaf_to_ends = 0
        self.role = role
        self._bus = bus
        self._subjects = subjects
        self._watcher = watcher or f"{subjects.namespace}_VllmWorker_{lease}"
        self._submitted: asyncio.Queue[Submit] = asyncio.Queue()
        self._cancelled: asyncio.Queue[RequestEpoch] = asyncio.Queue()
        self._asked_again: asyncio.Queue[Progress] = asyncio.Queue()
        self._seq = 0

    async def start(self, state: ProcessState = "ready") -> FakeWorker:
        await self._bus.listen(self._subjects.work(self.lease), Work, self._on_work)
        self._answering = await self._bus.serve(self._subjects.cached(self.lease), CachedQuestion, self._on_cached)
        await self.announce(state)
        return self

    async def announce(self, state: ProcessState, *, lease: str | None = None) -> None:
        await self._publish(Presence(self._watcher, "VllmWorker", self.role, lease or self.lease, NO_PROCESS, state))

    async def is_set_apart(self, exclusive: Exclusive) -> None:
        """Announce that."""
        presence = Presence(
            self._watcher, "VllmWorker", self.role, self.lease, NO_PROCESS, "ready", exclusive=exclusive
        )
        await self._publish(presence)

    async def _publish(self, presence: Presence) -> None:
        await self._bus.send(self._subjects.presence(self._watcher, presence.role), presence)

    async def vanish(self) -> None:
        """Let everybody know that this process is gone: its watcher has started another one."""
        await self.announce("starting", lease=f"after {self.lease}")

    async def die(self) -> None:
        """Let everybody know that its engine has died, and vanish."""
        await self.announce("failed")
        await self.vanish()

    async def keep_quiet_about_the_cache(self) -> None:
        await self._answering.unsubscribe()
        await self._bus.flush()

    async def submitted(self) -> Submit:
        return await asyncio.wait_for(self._submitted.get(), DEADLINE_S)

    async def cancelled(self) -> RequestEpoch:
        return await asyncio.wait_for(self._cancelled.get(), DEADLINE_S)

    async def asked_again(self) -> Progress:
        return await asyncio.wait_for(self._asked_again.get(), DEADLINE_S)

    @property
    def untouched(self) -> bool:
        return self._submitted.empty() and self._cancelled.empty()

    async def send(self, work: Submit, position: int, *token_ids: int, **more: Any) -> None:
        await self.send_all(work.frontend, TokenDelta(work.request_id, work.epoch, position, list(token_ids), **more))

    async def refuse(self, work: Submit) -> None:
        await self.send(work, 0, finish="error", error="not me", refused=True)

    async def send_all(self, frontend: str, *deltas: TokenDelta) -> None:
        self._seq += 1
        batch = TokenBatch(self.lease, self._seq, deltas)
        await self._bus.send(self._subjects.tokens(frontend), batch)

    async def _on_cached(self, _: CachedQuestion) -> CachedAnswer:
        return CachedAnswer(self.cached)

    async def _on_work(self, work: Work) -> None:
        if isinstance(work, Submit):
            self._submitted.put_nowait(work)
        elif isinstance(work, Cancel):
            for cancelled in work.requests:
                self._cancelled.put_nowait(cancelled)
        elif isinstance(work, Resend):
            for progress in work.progress:
                self._asked_again.put_nowait(progress)
        elif isinstance(work, AskExclusive):
            await self.is_set_apart(Exclusive(work.request_id, work.frontend, free=True))
        elif isinstance(work, EndExclusive):
            self.ends += 1
            if self.ends > self.deaf_to_ends:
                await self.announce("ready")


@dataclass
class FakeFrontend:
    """A dispatcher with all that surrounds it. Its clock stands still until `pass_silence`."""

    bus: Bus
    subjects: Subjects
    lease: str = "f1"
    deadlines: RecoveryDeadlines = PATIENT
    assigner_of: Callable[[FakeFrontend, LocalAssigner], Assigner] = lambda _, local: local
    remote_of: Callable[[FakeFrontend], PrefillJobs | None] = lambda _: None
    now: float = 100.0
    tasks: TaskGuard = field(default_factory=TaskGuard)
    changes: list[Change] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fleet = FleetWatch(self.bus, self.subjects, clock=lambda: self.now)
        self.fleet.subscribe(self.changes.append)
        self.local = LocalAssigner(self.fleet, self.lease)
        self.remote = self.remote_of(self)
        self.dispatcher = BusDispatcher(
            self.bus,
            self.subjects,
            self.lease,
            self.fleet,
            self.assigner_of(self, self.local),
            self.tasks,
            self.deadlines,
            self.remote,
        )

    async def start(self) -> FakeFrontend:
        await self.dispatcher.start()
        await self.fleet.start()
        await self.bus.flush()
        return self

    async def knows(self, *workers: FakeWorker) -> None:
        leases = sorted(worker.lease for worker in workers)
        await until(lambda: sorted(p.lease for p in self.fleet.view.routable()) == leases)

    async def output(self) -> TokenDelta:
        """The next delta; the tests send so that each comes alone."""
        outputs = await asyncio.wait_for(self.dispatcher.outputs(), DEADLINE_S)
        (delta,) = outputs.deltas
        return delta

    @property
    def silent(self) -> bool:
        """Whether no output waits to be taken."""
        return self.dispatcher.table.outputs.empty()

    def pass_silence(self, seconds: float = 3.0) -> None:
        """Nobody is heard for so long."""
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            self.fleet.tick()

    async def revoke(self, worker: FakeWorker) -> None:
        await self.bus.send(self.subjects.revoked, LeaseRevoked(lease=worker.lease))

    async def close(self) -> None:
        """Nothing may have gone wrong unnoticed."""
        failed = asyncio.create_task(self.tasks.failed())
        await asyncio.sleep(0)
        assert not failed.done(), failed.exception()
        failed.cancel()
        assert await self.tasks.close() == []
