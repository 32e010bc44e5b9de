"""Six streams on one worker, each stopped at another state of its migration to a second one. Run as a frontend of its
own:

    python -m tests.integration.migration.migration_scene BUS_FILE NAMESPACE SOURCE DESTINATION

says "stopped" when they are, and is then to be killed.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from msgspec import structs

from components.frontend.migration.scheduler import AtOnce
from components.frontend.placing import LocalAssigner, RouterAssigner
from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus, RawMessage
from dynamo_local.bus.presence import Announcer
from dynamo_local.core.messages.admin import MigrationResult
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.routing import Assignment, AssignRequest
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.request.recovery import RecoveryDeadlines
from dynamo_local.core.subjects import Subjects
from dynamo_local.process.ancestry import die_with_parent
from tests.chaos.answers import Answer, Outcome
from tests.chaos.settings import VOCAB_SIZE
from tests.chaos.tasks import Task
from tests.integration.fleet_of_fakes import DEADLINE_S, FakeFrontend, until
from tests.integration.migration.held_migrations import PATIENT_MIGRATIONS, HoldingBus, State

_PROMPT_TOKENS = 100
_CROWD, _CROWD_PROMPT, _CROWD_TOKENS = 24, 300, 100
"""More than a worker's 512 blocks of 16 tokens."""

_TOKENS = 400
"""Nearly all of them come in any case: the streams are to last until their migrations have stopped."""
_LIVELY = RecoveryDeadlines(silence_s=0.5, gap_s=0.1, ask_again_s=0.05, fruitless_epochs=50)
"""Of a frontend that asks soon after what was lost."""


class BeginsAt(RouterAssigner):
    """Has requests begin at one worker; where they go then is the router's to say."""

    def __init__(self, front: FakeFrontend, local: LocalAssigner, first: str) -> None:
        super().__init__(front.bus, front.subjects, front.lease, local)
        self._first = first
        self._begun: set[str] = set()

    async def assign(self, request: AssignRequest) -> Assignment:
        if request.request_id in self._begun:
            return await super().assign(request)
        self._begun.add(request.request_id)
        await self.reassign(request.request_id, self._first, request.tokens)
        return Assignment(self._first)


@dataclass
class Crowd:
    """Requests that one worker is to answer before all others."""

    front: FakeFrontend
    worker: str

    async def come(self) -> None:
        for number in range(_CROWD):
            task = Task(f"{self.front.lease} {number}", _drawn(f"{number}", _CROWD_PROMPT), _CROWD_TOKENS)
            await self.front.dispatcher.submit(structs.replace(task.request(), priority=-1))

    async def ended(self) -> None:
        left = _CROWD
        while left:
            deltas = (await asyncio.wait_for(self.front.dispatcher.outputs(), DEADLINE_S)).deltas
            left -= sum(delta.finish is not None for delta in deltas)
        await self.front.close()


class Scene:
    """Of one frontend. `tokens`: of each answer, at most."""

    def __init__(self, bus: HoldingBus, subjects: Subjects, source: str, destination: str) -> None:
        self.source = source
        self.destination = destination
        self.bus = bus
        self.subjects = subjects
        lease = f"f{time.monotonic_ns()}"
        self.front = FakeFrontend(
            bus, subjects, lease, deadlines=_LIVELY, assigner_of=lambda front, local: BeginsAt(front, local, source)
        )
        self.front.dispatcher.migrations.at_once = AtOnce(len(State), len(State))
        self.front.dispatcher.migrations.executor.limits = PATIENT_MIGRATIONS
        self.answers = {state.name: Answer(_task(state.name, lease), time.monotonic()) for state in State}
        self.migrating: dict[str, asyncio.Future[MigrationResult]] = {}
        self._pulls = asyncio.Event()

    @property
    def ids(self) -> dict[str, str]:
        """Of the requests, by state."""
        return {name: answer.task.request_id for name, answer in self.answers.items()}

    async def set(self, observer: Bus) -> Self:
        """Until every migration has stopped. `observer`: a connection that is not held."""
        front, self.observer = self.front, observer
        await observer.subscribe(self.subjects.pin(self.source), self._on_pin)
        self.bus.watch(self.subjects, {self.ids[state.name]: state for state in State})
        await front.start()
        await until(lambda: self._knows(self.source) and self._knows(self.destination))
        front.tasks.spawn("answers", self._read())
        for answer in self.answers.values():
            await front.dispatcher.submit(answer.task.request())
        await until(lambda: all(answer.received for answer in self.answers.values()))
        for name, request_id in self.ids.items():
            live = front.dispatcher.table.requests[request_id]
            self.migrating[name] = front.dispatcher.migrations.order(live, self.destination)
        async with asyncio.timeout(DEADLINE_S):
            await self.bus.all_stopped()
            await self._pulls.wait()
        return self

    async def crowd(self, worker: str) -> Crowd:
        """More than the worker has blocks for, of requests that go first."""
        front = FakeFrontend(
            self.observer,
            self.subjects,
            f"{self.front.lease}-crowd",
            deadlines=_LIVELY,
            assigner_of=lambda front, local: BeginsAt(front, local, worker),
        )
        await front.start()
        await until(lambda: front.fleet.view.get(worker) is not None)
        crowd = Crowd(front, worker)
        await crowd.come()
        return crowd

    async def leave(self) -> None:
        """All clients disconnect."""
        for answer in self.answers.values():
            answer.end(Outcome.LEFT)
        await self.front.dispatcher.cancel(list(self.ids.values()))

    async def ended(self, states: Sequence[State] = tuple(State)) -> None:
        """Until these requests have been answered."""
        try:
            await until(lambda: all(self.answers[state.name].outcome is not None for state in states))
        except TimeoutError:
            raise AssertionError(f"not answered: {self._unanswered()}") from None

    async def outcomes(self) -> dict[State, str]:
        """Of the migrations."""
        async with asyncio.timeout(DEADLINE_S):
            return {State[name]: (await migrating).outcome for name, migrating in self.migrating.items()}

    def _unanswered(self) -> list[str]:
        live = self.front.dispatcher.table.requests
        return [
            f"{name}: {answer}, {live[answer.task.request_id].log.current} at {live[answer.task.request_id].log.worker}"
            for name, answer in self.answers.items()
            if answer.outcome is None
        ]

    def _knows(self, worker: str) -> bool:
        return any(p.lease == worker and p.engine is not None for p in self.front.fleet.view.routable())

    async def _on_pin(self, _: RawMessage) -> None:
        if self.bus.pulls:
            self._pulls.set()

    async def _read(self) -> None:
        names = {request_id: name for name, request_id in self.ids.items()}
        while True:
            for delta in (await self.front.dispatcher.outputs()).deltas:
                self.answers[names[delta.request_id]].take(delta, time.monotonic())


def _task(name: str, salt: str) -> Task:
    stop = random.Random(salt + name).randrange(VOCAB_SIZE)
    prompt = _drawn(name + salt, _PROMPT_TOKENS)
    return Task(f"{name} {salt}", prompt, _TOKENS, min_tokens=_TOKENS * 7 // 8, stop_token=stop)


def _drawn(seed: str, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=tokens)


async def _main(bus_file: Path, namespace: str, source: str, destination: str) -> None:
    address, subjects = BusAddress.load(bus_file), Subjects(namespace, FIRST_OF_MAIN)
    observer, bus = await Bus.connect(address, name="observer"), await HoldingBus.connect(address, name="scene")
    assert isinstance(bus, HoldingBus)
    scene = Scene(bus, subjects, source, destination)
    front = scene.front
    presence = Presence(f"{namespace}_Front", "Front", "frontend", front.lease, os.getpid(), "ready")
    front.tasks.spawn("presence", Announcer(observer, subjects, presence).run())
    await scene.set(observer)
    print("stopped", flush=True)
    await front.tasks.failed()


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(_main(Path(sys.argv[1]), *sys.argv[2:]))
