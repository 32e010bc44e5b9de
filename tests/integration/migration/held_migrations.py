"""A frontend's connection on which migrations stop at a state of their own, until they are let go."""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import Mapping

from dynamo_local.bus.nats import Bus
from dynamo_local.core import codec
from dynamo_local.core.messages.work import Cancel, MigrationRequest, RequestEpoch, Submit, Warm, Work
from dynamo_local.core.migration.protocol import MigrationLimits
from dynamo_local.core.subjects import Subjects

PATIENT_MIGRATIONS = MigrationLimits(reserve_s=10.0, room_s=15.0, warm_s=10.0, missing_tokens=0, rounds=2)
"""For migrations that are stopped: they have the time, and each has its second round."""


class State(enum.Enum):
    """How far a migration has come when it stops."""

    RESERVED = "room is kept, and the frontend has not heard of it"
    PULLING = "the destination has been asked to pull the first blocks"
    WARM = "it has them, and the frontend has not heard of it"
    AGAIN = "it has those that have filled up meanwhile, too"
    CUT = "the next epoch is minted, and not submitted"
    SUBMITTED = "it is submitted, and the source has not been told"


_ANSWERED = {State.RESERVED: 0, State.WARM: 1, State.AGAIN: 2}
"""Those that stop at an answer: to the question to reserve, or to the first or second one to warm."""


class HoldingBus(Bus):
    """Of the requests that it watches, by their ids; whatever else is said passes."""

    def watch(self, subjects: Subjects, states: Mapping[str, State]) -> None:
        """Hold these from now on. What is PULLING comes to that only when all others have stopped."""
        self._subjects = subjects
        self._states = states
        self._rounds: Counter[str] = Counter()
        self._stopped: set[str] = set()
        self.pulls = False
        """The one that is PULLING goes on, as the last."""
        self._one_more = asyncio.Event()
        self._free = asyncio.Event()

    async def all_stopped(self, but: int = 0) -> None:
        """Until every migration, but so many, is where it stops."""
        while len(self._stopped) < len(self._states) - but:
            self._one_more.clear()
            await self._one_more.wait()

    def let_go(self) -> None:
        self._free.set()

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        if not subject.startswith(self._subjects.migrations("")):
            return await super().request(subject, data, timeout_s=timeout_s)
        word: MigrationRequest = codec.decode(data, MigrationRequest)
        name, state = word.request_id, self._states[word.request_id]
        self._rounds[name] += isinstance(word, Warm)
        pulls = state is State.PULLING and self._rounds[name] == 1
        if pulls:
            await self.all_stopped(but=1)
            self.pulls = True
            self._note(name)
        answer = await super().request(subject, data, timeout_s=timeout_s)
        if pulls or _ANSWERED.get(state) == self._rounds[name]:
            self._note(name)
            await self._free.wait()
        return answer

    async def publish(self, subject: str, data: bytes, *, reply: str = "") -> None:
        name = self._cut_by(subject, data)
        if name is not None and name not in self._stopped:
            self._note(name)
            await self._free.wait()
        await super().publish(subject, data, reply=reply)

    def _cut_by(self, subject: str, data: bytes) -> str | None:
        """The request whose migration is to stop before this is said."""
        if not subject.startswith(self._subjects.work("")):
            return None
        match codec.decode(data, Work):
            case Submit(request_id=name, epoch=2) if self._states[name] is State.CUT:
                return name
            case Cancel(requests=(RequestEpoch(name, 1),)) if self._states[name] is State.SUBMITTED:
                return name
        return None

    def _note(self, name: str) -> None:
        self._stopped.add(name)
        self._one_more.set()
