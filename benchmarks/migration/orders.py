"""Requests of a server, and orders to move them, by `dynamo requests` and `dynamo migrate`."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, fields
from typing import Any

from benchmarks.harness.load import LETTERS
from benchmarks.harness.servers import READY_WITHIN_S, Server, ServerError

_POLL_S = 0.5


def draw_prompt(draw: random.Random, tokens: int) -> list[int]:
    """Draws a prompt that nobody has cached."""
    return draw.choices(LETTERS, k=tokens)


@dataclass(frozen=True)
class Migration:
    """What `dynamo migrate` says of a request. `worker`: its destination. `warm_s`: from the beginning to the cut;
    `gap_s`: from the last token before the cut to the first after it, and in decode steps."""

    request: str
    outcome: str
    why: str
    worker: str | None
    warm_s: float | None
    gap_s: float | None
    gap_steps: float | None


@dataclass(frozen=True)
class Orders:
    """To one server, of ours."""

    server: Server

    async def workers(self, number: int) -> list[dict[str, Any]]:
        """The ready workers, as `dynamo ps` shows them, once there are so many. Raises TimeoutError."""
        async with asyncio.timeout(READY_WITHIN_S):
            while True:
                rows = await self.server.dynamo("ps")
                found = [row for row in rows if row["role"] == "aggregated" and row["state"] == "ready"]
                if len(found) == number:
                    return found
                await asyncio.sleep(_POLL_S)

    async def move(self, *which: str) -> list[Migration]:
        """Move a request, or those that the options of `dynamo migrate` say."""
        names = [each.name for each in fields(Migration)]
        return [Migration(*map(line.get, names)) for line in await self.server.dynamo("migrate", *which)]

    async def level(self) -> None:
        """Have each of the two workers as many requests as the other: a step takes longer, the more there are."""
        by_worker = {row["watcher"]: list[str]() for row in await self.workers(2)}
        for row in (await self.server.dynamo("requests"))["requests"]:
            if row["worker"] is not None:
                by_worker[row["worker"]].append(row["request"])
        few, many = sorted(by_worker.values(), key=len)
        for request in many[: (len(many) - len(few)) // 2]:
            with contextlib.suppress(ServerError):  # it may be over by now
                await self.move(request)
