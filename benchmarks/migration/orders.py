"""Orders to move requests, as `dynamo migrate` gives them, without the time that a command takes to start."""

from __future__ import annotations

import asyncio
import random
from types import TracebackType
from typing import Self, TypeVar

from benchmarks.harness.load import LETTERS
from benchmarks.harness.servers import NAMESPACE, Server, ServerError
from dynamo_local.bus.nats import Bus, BusAddress
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.fleet.view import WORKER_ROLES
from dynamo_local.core.messages.admin import (
    MigrationOrder,
    MigrationReport,
    MigrationResult,
    RequestRow,
    RequestsAnswer,
    RequestsQuestion,
)
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.subjects import Subjects
from state.paths import StatePaths

_Reply = TypeVar("_Reply")
_ANSWER_S = 60.0
_POLL_S = 0.005


def draw_prompt(draw: random.Random, tokens: int) -> list[int]:
    """Draws a prompt that nobody has cached."""
    return draw.choices(LETTERS, k=tokens)


class Orders:
    """To the one frontend of a server. An async context manager."""

    def __init__(self, server: Server) -> None:
        assert server.state_root is not None
        self._bus_file = StatePaths(server.state_root, NAMESPACE).bus_file
        self._subjects = Subjects(NAMESPACE)
        self._bus: Bus | None = None
        self._fleet: FleetWatch | None = None

    async def __aenter__(self) -> Self:
        self._bus = await Bus.connect(BusAddress.load(self._bus_file), name="benchmark", deadline_s=60.0)
        self._fleet = FleetWatch(self._bus, self._subjects)
        await self._fleet.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bus is not None:
            await self._bus.close()

    async def workers(self, number: int) -> list[Presence]:
        """The ready workers, once there are so many."""
        assert self._fleet is not None
        while len(found := self._fleet.view.routable(WORKER_ROLES)) != number:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        return found

    async def requests(self) -> tuple[RequestRow, ...]:
        """All that are under way."""
        return (await self._ask(RequestsQuestion(2000), RequestsAnswer)).requests

    async def find(self, prompt_tokens: int) -> str:
        """The one request with a prompt of this length."""
        for row in await self.requests():
            if row.prompt_tokens == prompt_tokens:
                return row.request_id
        raise ServerError(f"there is no request with a prompt of {prompt_tokens} tokens")

    async def move(self, request_id: str, *, cold: bool = False) -> MigrationResult:
        (result,) = await self._results(MigrationOrder((request_id,), cold=cold))
        return result

    async def move_all(self, source: str) -> tuple[MigrationResult, ...]:
        """All requests of a worker, its lease given."""
        return await self._results(MigrationOrder(source=source))

    async def level(self) -> None:
        """Have each of the two workers as many requests as the other: a step takes longer, the more there are."""
        by_worker = {worker.lease: list[str]() for worker in await self.workers(2)}
        for row in await self.requests():
            if row.worker is not None:
                by_worker[row.worker].append(row.request_id)
        few, many = sorted(by_worker.values(), key=len)
        for request_id in many[: (len(many) - len(few)) // 2]:
            # It may be over by now.
            await self._results(MigrationOrder((request_id,)))

    async def _results(self, order: MigrationOrder) -> tuple[MigrationResult, ...]:
        return (await self._ask(order, MigrationReport)).results

    async def _ask(self, inquiry: RequestsQuestion | MigrationOrder, reply: type[_Reply]) -> _Reply:
        assert self._bus is not None
        assert self._fleet is not None
        # On a machine that is too busy it may be unheard for a moment.
        while not (found := [p.lease for p in self._fleet.view.members() if p.role == "frontend"]):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        return await self._bus.ask(self._subjects.requests(found[0]), inquiry, reply, timeout_s=_ANSWER_S)
