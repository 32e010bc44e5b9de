"""Frontend -> Middle -> Backend: Backend streams words, and the others pass each one on as it arrives.

dynamo serve examples.hello_world.hello_world:Frontend
curl -N 'http://127.0.0.1:8000/generate?text=hello+world'
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from dynamo_local.core.names import HTTP_HOST_ENV, HTTP_PORT_ENV
from dynamo_local.process.context import ServiceContext
from dynamo_local.sdk import async_on_shutdown, async_on_start, depends, endpoint, service
from examples.hello_world.http_stream import HttpStream


@service()
class Backend:
    """Streams the words of a text."""

    @endpoint()
    async def generate(self, text: str) -> AsyncIterator[str]:
        for word in text.split():
            yield f"Backend: {word}"


@dataclass(frozen=True)
class MiddleSettings:
    """Settings of Middle, set with `--Middle.suffix=!`, or in a configuration file under `Middle:`."""

    suffix: str = field(default="-mid", metadata={"help": "Text appended to each request."})


@service(config=MiddleSettings)
class Middle:
    """Changes the text and every reply."""

    backend = depends(Backend)

    def __init__(self, context: ServiceContext) -> None:
        self._suffix = context.settings(MiddleSettings).suffix

    @endpoint()
    async def generate(self, text: str) -> AsyncIterator[str]:
        async for reply in self.backend.generate(f"{text}{self._suffix}"):
            yield f"Middle: {reply}"


@service()
class Frontend:
    """Receives a text over HTTP, and streams the replies."""

    middle = depends(Middle)

    def __init__(self, context: ServiceContext) -> None:
        self._announcer = context.announcer
        self._http = HttpStream(self.generate)

    @endpoint()
    async def generate(self, text: str) -> AsyncIterator[str]:
        async for reply in self.middle.generate(text):
            yield f"Frontend: {reply}"

    @async_on_start
    async def listen(self) -> None:
        """Listen on the host and port of `dynamo serve`, and announce the address for `dynamo ps`."""
        host, port = os.environ.get(HTTP_HOST_ENV, "127.0.0.1"), os.environ.get(HTTP_PORT_ENV, "8000")
        await self._http.start(host, int(port))
        self._announcer.update(url=self._http.url)

    @async_on_shutdown
    async def close(self) -> None:
        await self._http.stop()
