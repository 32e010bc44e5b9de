"""Services whose processes test_host.py starts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal

from dynamo_local.core.errors import ConfigError, EngineError
from dynamo_local.process.context import ServiceContext
from dynamo_local.sdk import async_on_shutdown, async_on_start, depends, endpoint, service


@dataclass(frozen=True)
class MoodySettings:
    start: Literal["well", "refused", "broken", "never"] = "well"
    later: Literal["nothing", "task dies", "bad end", "task dies at the end"] = "nothing"


@service()
class Plain:
    """No constructor, no hooks."""

    @endpoint()
    async def ping(self) -> str:
        return "pong"


@service(config=MoodySettings)
class Moody:
    plain = depends(Plain)

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._settings = context.settings(MoodySettings)

    @async_on_start
    async def start(self) -> None:
        print("starting", flush=True)
        match self._settings.start:
            case "refused":
                raise ConfigError("no such model", "name another")
            case "broken":
                raise ValueError("two\nlines")
            case "never":
                await asyncio.Event().wait()
            case "well":
                return

    @endpoint()
    async def die(self) -> None:
        self._context.tasks.spawn("doomed", self._doomed())

    @endpoint()
    async def lease(self) -> str:
        return self._context.lease

    @endpoint()
    async def ask(self) -> str:
        answer = await self.plain.ping()
        return f"{answer} for {self._context.watcher}"

    @async_on_shutdown
    async def first(self) -> None:
        print("first hook", flush=True)
        if self._settings.later == "bad end":
            raise EngineError("the engine would not end")
        if self._settings.later == "task dies at the end":
            await asyncio.wait([self._context.tasks.spawn("doomed", self._doomed())])

    @async_on_shutdown
    async def second(self) -> None:
        print("second hook", flush=True)

    async def _doomed(self) -> None:
        raise EngineError("the engine died", "see its log")
