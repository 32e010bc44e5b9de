"""Workers of a revision are asked to park and to wake; they refuse, do not answer, or have gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from dynamo_local.core.endpoints.rollout import Park, Seen, Wake
from dynamo_local.core.fleet.view import FleetView
from dynamo_local.core.messages.presence import Presence, ProcessState
from dynamo_local.core.names import Revision, Watcher
from dynamo_local.supervisor.endpoints.revisions.parking import NotDone
from dynamo_local.supervisor.endpoints.revisions.revision import RevisionRun
from dynamo_local.supervisor.places.capacity import Startable
from state.statefile.model import State
from state.statefile.transitions import claim, settle
from tests.unit.state.builders import empty_state, with_process
from tests.unit.supervisor.endpoints.made_parts import endpoint_of, parts_of

CHAT = Revision("chat", 1)
WORKER = Watcher("dynamo", "VllmWorker", revision=str(CHAT))
NAME = str(WORKER)


def one_worker() -> State:
    state = claim(empty_state(), WORKER, role="aggregated", cmd="worker", devices=(0,), share=1.0, phase="starting")
    return settle(with_process(state, WORKER, "lease", 1), NAME)


@dataclass
class FakeWorker:
    """A worker that parks and wakes, or says why not, and announces what it is a little later."""

    refuses: str = ""
    is_reached: bool = True
    asked: list[bool] = field(default_factory=list)
    view: FleetView = field(default_factory=FleetView)
    changed: Callable[[], None] = lambda: None
    now: float = 0.0
    gone: Mapping[int, str] = field(default_factory=dict)

    dies: bool = False
    """Whether its process is killed with the question, so that another one starts."""

    def announce(self, state: ProcessState, lease: str = "lease") -> None:
        self.view.observe(Presence(NAME, "VllmWorker", "aggregated", lease, 1, state), 0.0)
        self.changed()

    async def ask(self, revision: Revision, leases: Mapping[str, str], *, parked: bool) -> dict[str, NotDone]:
        assert (revision, dict(leases)) == (CHAT, {NAME: "lease"})
        self.asked.append(parked)
        if self.dies:
            asyncio.get_running_loop().call_soon(self.announce, "starting", f"lease {len(self.asked)}")
            await asyncio.Event().wait()
        if self.refuses:
            return {NAME: NotDone(self.refuses, self.is_reached)}
        asyncio.get_running_loop().call_soon(self.announce, "parked" if parked else "ready")
        return {}


def scenario(test: Callable[[FakeWorker, RevisionRun, Callable[[], Awaitable[Seen]]], Awaitable[None]]) -> None:
    async def run() -> None:
        worker, ended = FakeWorker(), asyncio.Event()
        parts = parts_of(
            read=one_worker, parking=worker, gone=lambda: worker.gone, retry_s=1.0, clock=lambda: worker.now
        )
        revision = RevisionRun(CHAT, parts, endpoint_of(ended.set))
        revision._watch = cast("Any", worker)
        worker.changed = revision._on_change
        worker.announce("ready")

        async def seen() -> Seen:
            while revision.is_busy:
                ended.clear()
                await ended.wait()
            return revision.seen(one_worker(), Startable())

        await test(worker, revision, seen)

    asyncio.run(run())


def test_a_worker_is_parked_and_woken() -> None:
    async def test(worker: FakeWorker, revision: RevisionRun, seen: Callable[[], Awaitable[Seen]]) -> None:
        revision.carry_out(Park(1, (NAME,)))
        parked = await seen()
        assert (parked.workers.ready, parked.workers.parked, parked.workers.present) == ((), (NAME,), 1)
        revision.carry_out(Wake(1, (NAME,)))
        assert (await seen()).workers.ready == (NAME,)
        assert worker.asked == [True, False]

    scenario(test)


def test_a_worker_that_refuses_to_park_stays_ready_and_is_asked_again_later() -> None:
    async def test(worker: FakeWorker, revision: RevisionRun, seen: Callable[[], Awaitable[Seen]]) -> None:
        worker.refuses = "it has 1 request"
        revision.carry_out(Park(1, (NAME,)))
        refused = await seen()
        assert (refused.workers.ready, refused.may_park, refused.failures) == ((NAME,), False, 0)
        worker.now += 60
        assert (await seen()).may_park

    scenario(test)


def test_a_parked_worker_that_was_killed_is_awaited() -> None:
    async def test(worker: FakeWorker, revision: RevisionRun, seen: Callable[[], Awaitable[Seen]]) -> None:
        worker.announce("parked")
        worker.refuses, worker.is_reached = "no process listens", False
        for _ in range(5):
            revision.carry_out(Wake(1, (NAME,)))
            killed = await seen()
            assert (killed.workers.present, killed.failures, killed.may_start) == (1, 0, False)
            worker.now += 60
        assert (await seen()).may_start
        worker.announce("ready")
        assert (await seen()).workers.ready == (NAME,)

    scenario(test)


def test_a_worker_that_was_killed_with_the_question_is_awaited() -> None:
    async def test(worker: FakeWorker, revision: RevisionRun, seen: Callable[[], Awaitable[Seen]]) -> None:
        worker.announce("parked")
        worker.dies = True
        for _ in range(5):
            revision.carry_out(Wake(1, (NAME,)))
            killed = await seen()
            assert (killed.workers.dead, killed.failures, killed.error) == ((), 0, "")

    scenario(test)


def test_a_worker_that_cannot_be_woken_is_to_be_replaced() -> None:
    async def test(worker: FakeWorker, revision: RevisionRun, seen: Callable[[], Awaitable[Seen]]) -> None:
        worker.announce("parked")
        worker.refuses = "its engine is broken"
        revision.carry_out(Wake(1, (NAME,)))
        once = await seen()
        assert (once.workers.parked, once.failures, "its engine is broken" in once.error) == ((NAME,), 1, True)
        revision.carry_out(Wake(1, (NAME,)))
        assert (await seen()).workers.dead == (NAME,)

    scenario(test)


def test_a_worker_whose_device_is_gone_is_not_asked_and_nothing_has_failed() -> None:
    async def test(worker: FakeWorker, revision: RevisionRun, seen: Callable[[], Awaitable[Seen]]) -> None:
        worker.announce("parked")
        worker.gone = {0: "offline: 0"}
        revision.carry_out(Wake(1, (NAME,)))
        lost = await seen()
        assert (lost.workers.dead, lost.failures, worker.asked) == ((NAME,), 0, [])

    scenario(test)
