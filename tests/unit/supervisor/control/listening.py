"""A control API at the socket of a server that is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from dynamo_local.supervisor.control.api import ControlApi, ControlSocket
from state.files import make_private_directory
from state.paths import StatePaths


@asynccontextmanager
async def listening(
    api: ControlApi, paths: StatePaths, before_end: Callable[[], None] = lambda: None
) -> AsyncIterator[None]:
    """Answer until the context ends."""
    make_private_directory(paths.run_dir)
    path = paths.run_dir / "control.sock"
    socket = ControlSocket(api, path)
    running = asyncio.create_task(socket.run())
    try:
        yield
    finally:
        before_end()
        await socket.close(running)
        path.unlink()
