"""`dynamo top`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import click

from dynamo_local.cli.options import namespace_option, paths_of
from dynamo_local.cli.output import print_json

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator

    from dynamo_local.monitor.top import TopSession, TopView
    from state.paths import StatePaths


@click.command()
@namespace_option
@click.option(
    "--once", is_flag=True, help="Print the present state once and end. This is the default without a terminal."
)
@click.option("--json", "as_json", is_flag=True, help="Print the present state once, as JSON.")
def top(namespace: str, once: bool, as_json: bool) -> None:
    """Show workers, requests and planner of a server live.

    The screen has workers and their load, by endpoint if there are any, requests, the prefill queue and the planner.
    Press q to end.

    \b
    dynamo top
    dynamo top --once    the present state as text
    """
    import asyncio
    import sys

    paths = paths_of(namespace)
    if as_json:
        print_json(asyncio.run(_look(paths)))
    elif once or not sys.stdout.isatty():
        from dynamo_local.monitor.screen import print_once

        print_once(asyncio.run(_look(paths)))
    else:
        asyncio.run(_watch(paths))


async def _look(paths: StatePaths) -> TopView:
    import asyncio

    from dynamo_local.monitor.top import FIRST_LOOK_S

    async with _session(paths) as session:
        await session.wait(FIRST_LOOK_S, unless=asyncio.Event())
        return session.view()


async def _watch(paths: StatePaths) -> None:
    """Redraw the screen until q is pressed; raise NotRunningError when the server ends."""
    import asyncio
    import signal

    from dynamo_local.core.errors import NotRunningError
    from dynamo_local.monitor.screen import live_screen
    from dynamo_local.monitor.top import REFRESH_S
    from state.locks import server_pid

    async with _session(paths) as session:
        enough = asyncio.Event()
        with _keys(enough), live_screen() as draw:
            asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, lambda: draw(session.view()))
            while not enough.is_set():
                if await asyncio.to_thread(server_pid, paths) is None:
                    raise NotRunningError(f"the server in namespace {paths.namespace} has ended")
                draw(session.view())
                await session.wait(REFRESH_S, unless=enough)


@asynccontextmanager
async def _session(paths: StatePaths) -> AsyncIterator[TopSession]:
    from functools import partial

    import msgspec

    from dynamo_local.control.client import ControlClient
    from dynamo_local.control.descriptions import FleetLook
    from dynamo_local.control.operations import LOOK
    from dynamo_local.monitor.top import TopSession
    from dynamo_local.supervisor.server.reports.event_log import EventReader
    from state.endpoints.board import read_board

    def look() -> FleetLook:
        return msgspec.convert(ControlClient(paths).do(LOOK), FleetLook)

    session = TopSession(paths.namespace, look, EventReader(paths.events_file).new, partial(read_board, paths))
    try:
        await session.start()
        yield session
    finally:
        await session.close()


@contextmanager
def _keys(enough: asyncio.Event) -> Iterator[None]:
    """Set `enough` on q, Ctrl-C and SIGTERM. The terminal's mode is restored afterwards."""
    import asyncio
    import os
    import signal
    import sys
    import termios
    import tty

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, enough.set)
    if not sys.stdin.isatty():
        yield
        return

    def on_key() -> None:
        keys = os.read(stdin, 16)
        # An empty read means that the terminal has gone.
        if not keys or b"q" in keys.lower():
            enough.set()

    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    tty.setcbreak(stdin)
    loop.add_reader(stdin, on_key)
    try:
        yield
    finally:
        loop.remove_reader(stdin)
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)
