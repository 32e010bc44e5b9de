"""Engines that die of a request, and those that are beside it: mockers that end when they compute a certain token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dynamo_local.bus.nats import Bus
from dynamo_local.core import codec
from dynamo_local.core.errors import EngineError
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.work import TokenDelta
from dynamo_local.core.ports import Request, Step
from dynamo_local.core.request.recovery import CLEARING_TOKENS, RecoveryDeadlines, Survival
from dynamo_local.core.subjects import Subjects
from dynamo_local.engine.mocker.engine import MockerEngine
from dynamo_local.engine.mocker.tokens import continuation
from dynamo_local.tasks import TaskGuard
from tests.integration.conftest import Connect
from tests.integration.fleet_of_fakes import DEADLINE_S, NO_PROCESS, FakeFrontend, request, until
from tests.integration.frontend.mocked_answers import FAST, asking_for
from tests.integration.workers.worker_parts import Worker, context_of, start_router

pytestmark = pytest.mark.integration

DEADLY = 10**6
"""A prompt that ends with DEADLY + n ends engines as soon as they have computed n tokens behind it."""

EVERY = 2 * 10**6
"""One that ends with EVERY + n, n tokens after they have taken it up."""

EAGER = RecoveryDeadlines(silence_s=0.5, gap_s=0.1, ask_again_s=0.05)


class MortalMocker(MockerEngine):
    """Ends of what it computes. `aboard`, if it did: the requests that it had then."""

    aboard: tuple[str, ...] = ()

    async def step(self) -> Step:
        step = await super().step()
        ends = [live for live in self._live.values() if _is_the_end(live.sequence.tokens, live.sequence.drawn)]
        if ends:
            self.aboard = tuple(sorted(live.current.request_id for live in self._live.values()))
            raise EngineError("the engine died")
        return step


def _is_the_end(tokens: list[int], drawn: int) -> bool:
    for index, token in enumerate(tokens):
        if token >= EVERY:
            return drawn >= token - EVERY
        if token >= DEADLY:
            return len(tokens) - index - 1 >= token - DEADLY
    return False


@dataclass
class Fleet:
    """Workers that are started again when their engines die."""

    connect: Connect
    subjects: Subjects
    directory: Path
    deaths: list[tuple[str, ...]] = field(default_factory=list)
    """Requests that engines had when they died."""
    says_failed: bool = True
    """Otherwise workers vanish as a whole."""
    started: int = 0
    tasks: TaskGuard = field(default_factory=TaskGuard)

    async def live(self, slot: int) -> None:
        while True:
            self.started += 1
            lease = f"w{self.started}"
            bus = await self.connect()
            context = context_of(bus, self.subjects, "VllmWorker", "aggregated", lease)
            context.announcer.update(watcher=f"{self.subjects.namespace}_slot{slot}")
            engine = MortalMocker(FAST, self.directory)
            worker = Worker(context, engine)
            try:
                await worker.start()
                await context.tasks.failed()
            except EngineError:
                self.deaths.append(engine.aboard)
                await self._is_gone(context.announcer.presence, bus)
            finally:
                await context.tasks.close()
                await bus.close()
                await engine.close(1.0)

    async def _is_gone(self, presence: Presence, bus: Bus) -> None:
        """What a worker says whose engine has died; and then it is not heard of any more."""
        subject = self.subjects.presence(presence.watcher, presence.role)
        words = [("failed", presence.lease)] if self.says_failed else []
        for state, lease in [*words, ("starting", f"after {presence.lease}")]:
            word = Presence(presence.watcher, "VllmWorker", "aggregated", lease, NO_PROCESS, state)  # type: ignore[arg-type]
            await bus.publish(subject, codec.encode(word))
        await bus.flush()


@asynccontextmanager
async def fleet_of(
    workers: int, frontend: FakeFrontend, connect: Connect, subjects: Subjects, directory: Path
) -> AsyncIterator[Fleet]:
    fleet = Fleet(connect, subjects, directory)
    for slot in range(workers):
        fleet.tasks.spawn(f"worker {slot}", fleet.live(slot))
    try:
        await until(lambda: len(frontend.fleet.view.routable()) == workers)
        yield fleet
    finally:
        await fleet.tasks.close()


def asked(name: str, prompt: tuple[int, ...], tokens: int) -> Request:
    return request(name, prompt, sampling=asking_for(tokens), max_tokens=tokens, survival=Survival())


def innocent(number: int, tokens: int = 150) -> Request:
    return asked(f"i{number}", tuple(range(number, number + 20 + 3 * number)), tokens)


def guilty(number: int = 0, token: int = DEADLY, tokens: int = 400) -> Request:
    return asked(f"g{number}", (*range(5), token), tokens)


class Reader:
    """Takes what comes, each position once and in order, until all have ended."""

    def __init__(self, front: FakeFrontend, requests: list[Request]) -> None:
        self._front = front
        self.requests = {one.request_id: one for one in requests}
        self.found: dict[str, list[int]] = {name: [] for name in self.requests}
        self.ends: dict[str, TokenDelta] = {}

    async def read(self) -> None:
        while len(self.ends) < len(self.requests):
            outputs = await asyncio.wait_for(self._front.dispatcher.outputs(), DEADLINE_S)
            for delta in outputs.deltas:
                if delta.request_id not in self.requests:
                    continue
                if delta.finish != "error":
                    assert delta.position == len(self.found[delta.request_id])
                    self.found[delta.request_id] += delta.token_ids
                if delta.finish is not None:
                    self.ends[delta.request_id] = delta

    def check(self) -> None:
        """The innocent have all that they have asked for, the guilty a reason."""
        for name, end in self.ends.items():
            one = self.requests[name]
            right = continuation(one.prompt_token_ids, one.max_tokens or 0, FAST.mocker_vocab_size)
            found = self.found[name]
            if name.startswith("i"):
                assert (end.finish, found) == ("length", right), name
            else:
                assert (end.finish, end.fault) == ("error", "deaths"), name
                assert found == right[: len(found)]


async def run(frontend: FakeFrontend, requests: list[Request]) -> Reader:
    reader = Reader(frontend, requests)
    for one in requests:
        await frontend.dispatcher.submit(one)
    await reader.read()
    reader.check()
    await until(lambda: frontend.dispatcher.live_requests == 0)
    return reader


def by_request(fleet: Fleet) -> Mapping[str, int]:
    return {name: sum(name in aboard for aboard in fleet.deaths) for aboard in fleet.deaths for name in aboard}


@pytest.fixture
async def eager(connect: Connect, subjects: Subjects) -> AsyncIterator[FakeFrontend]:
    frontend = await FakeFrontend(await connect(), subjects, deadlines=EAGER).start()
    yield frontend
    await frontend.close()


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("token", [DEADLY, DEADLY + 25, EVERY + 1], ids=["at once", "later", "each time"])
async def test_three_engines_die_of_one_request_and_all_others_finish(
    eager: FakeFrontend, connect: Connect, subjects: Subjects, tmp_path: Path, workers: int, token: int
) -> None:
    async with fleet_of(workers, eager, connect, subjects, tmp_path) as fleet:
        requests = [innocent(number) for number in range(8)]
        requests.insert(4, guilty(token=token))
        reader = await run(eager, requests)
        assert by_request(fleet)["g0"] == len(fleet.deaths) == 3
        assert fleet.deaths[2] == ("g0",)
        assert reader.ends["g0"].error == (
            "3 engines died while they worked on this request, the last one on nothing else"
        )
        await is_shared_again(eager, workers)


async def is_shared_again(frontend: FakeFrontend, workers: int) -> None:
    """No worker is set apart for anything any more, and all of them take requests."""
    await until(lambda: len(frontend.fleet.view.routable()) == workers)


async def test_several_deadly_requests_end_three_engines_each_at_most(
    eager: FakeFrontend, connect: Connect, subjects: Subjects, tmp_path: Path
) -> None:
    async with fleet_of(3, eager, connect, subjects, tmp_path) as fleet:
        deadly = [guilty(number, DEADLY + 7 * number) for number in range(3)]
        await run(eager, [*(innocent(number) for number in range(8)), *deadly])
        # Each was alone when the last one died of it.
        assert {("g0",), ("g1",), ("g2",)} <= set(fleet.deaths)
        assert max(by_request(fleet)[f"g{number}"] for number in range(3)) <= 3
        assert len(fleet.deaths) <= 9
        await is_shared_again(eager, 3)


async def test_who_is_cleared_and_ends_engines_later_is_found_out_the_next_time(
    eager: FakeFrontend, connect: Connect, subjects: Subjects, tmp_path: Path
) -> None:
    async with fleet_of(2, eager, connect, subjects, tmp_path) as fleet:
        await run(eager, [*(innocent(number) for number in range(4)), guilty(token=EVERY + 2 * CLEARING_TOKENS)])
        assert by_request(fleet)["g0"] == len(fleet.deaths) == 4
        await is_shared_again(eager, 2)


async def test_a_client_that_leaves_during_the_trial_leaves_a_worker_that_others_may_use(
    eager: FakeFrontend, connect: Connect, subjects: Subjects, tmp_path: Path
) -> None:
    async with fleet_of(1, eager, connect, subjects, tmp_path):
        tried = asyncio.Event()
        eager.fleet.subscribe(lambda change: tried.set() if change.presence.exclusive else None)
        await eager.dispatcher.submit(guilty(token=EVERY + CLEARING_TOKENS // 2, tokens=2000))
        await tried.wait()
        await eager.dispatcher.cancel(["g0"])
        await is_shared_again(eager, 1)
        await run(eager, [innocent(1)])


async def test_workers_that_vanish_say_nothing_about_their_requests(
    eager: FakeFrontend, connect: Connect, subjects: Subjects, tmp_path: Path
) -> None:
    async with fleet_of(2, eager, connect, subjects, tmp_path) as fleet:
        fleet.says_failed = False
        one = asked("i0", (1, 2, EVERY + 2), 12)
        await run(eager, [one, innocent(1)])
        assert by_request(fleet)["i0"] > 3


async def test_with_a_router(routed: FakeFrontend, connect: Connect, subjects: Subjects, tmp_path: Path) -> None:
    router = await start_router(context_of(await connect(), subjects, "Router", "router", "router"))
    async with fleet_of(2, routed, connect, subjects, tmp_path) as fleet:
        await run(routed, [*(innocent(number) for number in range(6)), guilty()])
        assert len(fleet.deaths) == 3
        await is_shared_again(routed, 2)
    await router.close()
