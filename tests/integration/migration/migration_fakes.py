"""Workers that answer questions about migrations as a test tells them to."""

from __future__ import annotations

import asyncio

from dynamo_local.bus.nats import Bus
from dynamo_local.core.messages.presence import EngineInfo, Load, Presence, ProcessState
from dynamo_local.core.messages.work import CancelReservation, MigrationAnswer, MigrationRequest, Reserve, Warm
from dynamo_local.core.subjects import Subjects
from dynamo_local.tasks import TaskGuard
from tests.integration.fleet_of_fakes import DEADLINE_S, NO_PROCESS, FakeWorker

BLOCK = 4
ENGINE = EngineInfo("fake", "model", 1000, BLOCK, 100, 8)


Later = asyncio.Future[MigrationAnswer]
"""Where a question is answered."""


class FakeMigrationTarget(FakeWorker):
    """Tells what it is asked about migrations, and answers when it is told to; or at once, if `agrees`."""

    def __init__(self, bus: Bus, subjects: Subjects, lease: str, *, agrees: bool = False, deaf: bool = False) -> None:
        """`deaf`: nobody listens there."""
        super().__init__(bus, subjects, lease)
        self.agrees = agrees
        self._deaf = deaf
        self.engine = ENGINE
        self.load: Load | None = None
        self._asked: asyncio.Queue[tuple[Reserve | Warm, Later]] = asyncio.Queue()
        self._given_back: asyncio.Queue[str] = asyncio.Queue()
        self._tasks = TaskGuard()

    async def start(self, state: ProcessState = "ready") -> FakeMigrationTarget:
        if not self._deaf:
            subject = self._subjects.migrations(self.lease)
            await self._bus.serve(subject, MigrationRequest, self._on_request, tasks=self._tasks)
        await super().start(state)
        return self

    async def announce(self, state: ProcessState, *, lease: str | None = None) -> None:
        lease = lease or self.lease
        presence = Presence(
            self._watcher, "VllmWorker", self.role, lease, NO_PROCESS, state, engine=self.engine, load=self.load
        )
        await self._bus.send(self._subjects.presence(self._watcher, presence.role), presence)

    async def asked(self) -> tuple[Reserve | Warm, Later]:
        """The next question, and where to answer it."""
        return await asyncio.wait_for(self._asked.get(), DEADLINE_S)

    async def agree(self) -> Reserve | Warm:
        """To what is asked next."""
        question, answer = await self.asked()
        answer.set_result(MigrationAnswer())
        return question

    async def answer(self, to: Later, refused: str | None = None) -> None:
        to.set_result(MigrationAnswer(refused))

    async def given_back(self) -> str:
        """The next request that does not come."""
        return await asyncio.wait_for(self._given_back.get(), DEADLINE_S)

    @property
    def keeps_room(self) -> bool:
        """Nothing has been given back, or not been looked at."""
        return self._given_back.empty()

    @property
    def unasked(self) -> bool:
        return self._asked.empty()

    async def _on_request(self, word: MigrationRequest) -> MigrationAnswer | None:
        if isinstance(word, CancelReservation):
            self._given_back.put_nowait(word.request_id)
            return None
        if self.agrees:
            return MigrationAnswer()
        answer: Later = asyncio.get_running_loop().create_future()
        self._asked.put_nowait((word, answer))
        return await answer
