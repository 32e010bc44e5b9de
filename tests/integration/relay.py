"""A way between two processes that is long, breaks, or lets nothing through: in user space, on loopback."""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from contextlib import suppress

_CHUNK = 65536


class Relay:
    """Passes on TCP connections to `target`, a port of `host`. `delay_s`: how long bytes are under way, one way."""

    def __init__(self, host: str, target: int, delay_s: float) -> None:
        self.taken = 0
        """Number of connections so far."""
        self._host = host
        self._target = target
        self._delay_s = delay_s
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Listen, and return the port."""
        self._server = await asyncio.start_server(self._take, self._host)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def part(self) -> None:
        """Let nothing through. What is sent meanwhile arrives afterwards, as TCP has it."""
        self._open.clear()

    def heal(self) -> None:
        """Let everything through again."""
        self._open.set()

    def cut(self) -> None:
        """Break off all connections. Bytes that are under way are lost."""
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _take(self, reader: StreamReader, writer: StreamWriter) -> None:
        self.taken += 1
        await self._open.wait()
        far_reader, far_writer = await asyncio.open_connection(self._host, self._target)
        self._writers |= {writer, far_writer}
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pass_on(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, reader: StreamReader, writer: StreamWriter) -> None:
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        async def arrive() -> None:
            while True:
                at, data = await under_way.get()
                await asyncio.sleep(at - loop.time())
                await self._open.wait()
                if not data:
                    break
                writer.write(data)
                with suppress(OSError):
                    await writer.drain()
            writer.close()

        async with asyncio.TaskGroup() as group:
            group.create_task(arrive())
            data = b"any"
            while data:
                try:
                    data = await reader.read(_CHUNK)
                except OSError:
                    data = b""
                under_way.put_nowait((loop.time() + self._delay_s, data))
