"""Runs a node server (server.py) as its order says."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dynamo_local.core.errors import DynamoError, StateError, one_line
from dynamo_local.supervisor.circus.ahead import CircusAhead
from dynamo_local.supervisor.node.agent import without_cluster
from dynamo_local.supervisor.node.order import MOST_BYTES, NodeOrder
from dynamo_local.supervisor.node.plans import forkserver_of
from dynamo_local.supervisor.node.server import NodeServer
from dynamo_local.supervisor.server.launch.launch import Launch
from dynamo_local.supervisor.server.launch.plan import HttpAddress, revision_templates
from dynamo_local.supervisor.server.settings import StopRequest, handled_signals
from dynamo_local.supervisor.upkeep.devices import DeviceHolds
from state.devices.inventory import probe
from state.files import make_private_directory, remove_tree, replace_file
from state.locks import ServerLock, is_locked
from state.paths import STATE_DIR_VARIABLE, StatePaths, state_root
from state.statefile.leftovers import clear_leftovers

_NO_HTTP = HttpAddress("127.0.0.1", 0)
"""The root service, which has an address, is at the head."""


class _Lines:
    """A report (server.reports.report.Report) on standard error."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def step(self, text: str) -> None:
        self.say(f"[{time.monotonic() - self._began:6.1f}s] {text}")

    def say(self, text: str) -> None:
        try:
            print(text, file=sys.stderr, flush=True)
        except OSError:
            # Whoever reads has gone.
            return

    def pending(self, text: str) -> None:
        self.step(text)


def run(circusd: CircusAhead, argv: Sequence[str] | None = None) -> int:
    """Run until told to end, with a circusd that was started ahead. Returns the exit status."""
    arguments = _parse(argv)
    try:
        order = NodeOrder.decode(sys.stdin.buffer.read(MOST_BYTES + 1))
        order.check_versions()
        root = arguments.state_dir or state_root(os.environ).parent / "nodes" / order.node
        if arguments.state_dir is None:
            remove_left(root)
        environ = without_cluster(os.environ) | {STATE_DIR_VARIABLE: str(root.absolute())}
        os.environ.clear()
        os.environ.update(environ)
        asyncio.run(_run(order, StatePaths.of(order.namespace, environ), arguments.watch_pid, circusd))
    except DynamoError as error:
        print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


async def _run(order: NodeOrder, paths: StatePaths, watch_pid: int | None, circusd: CircusAhead) -> None:
    stop, report = StopRequest(), _Lines()

    def on_signal() -> None:
        if stop.wanted.is_set():
            stop.hurry.set()
        stop.wanted.set()

    for number in handled_signals():
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    with ServerLock(paths) as lock, DeviceHolds(order.namespace) as holds:
        for note in clear_leftovers(lock):
            report.step(note)
        inventory = probe(order.slots, os.environ)
        templates = revision_templates(order.graph, "", paths.root)
        forkserver = forkserver_of(order.graph, inventory, paths.root)
        launch = Launch(order.graph, inventory, paths, order.bus, _NO_HTTP, templates, (), forkserver)
        server = NodeServer(order, launch, report, lock, holds, lambda: print("ready", flush=True), circusd)
        await server.run(stop, watch_pid)
    report.step("stopped")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dynamo_local.supervisor.node", description="Run a node server.")
    parser.add_argument("--state-dir", type=Path, help="folder of its state; by default one of the node's name")
    parser.add_argument("--watch-pid", type=int, help="process with which it ends")
    return parser.parse_args(argv)


# State folders of nodes, side by side: the id of a node that has ended is not used again.

_HOST = "host"
"""File in a folder: the machine that uses it. Several may have their folders on one file system, whose locks may tell
nothing of those of others."""

_KEPT_S = 3600.0
"""For those who want to read the logs; and a node server that is just starting holds no lock yet."""


def remove_left(root: Path) -> None:
    """Make `root`, this node's folder, and remove those beside it that this machine has used and in which no node
    server runs. Raises StateError if it cannot be made."""
    host = socket.gethostname()
    make_private_directory(root)
    replace_file(root / _HOST, host.encode(), durable=False)
    now = root.stat().st_mtime
    for folder in root.parent.iterdir():
        with suppress(OSError, StateError):
            is_ours = (folder / _HOST).read_text() == host
            if is_ours and now - folder.stat().st_mtime >= _KEPT_S and not any(map(is_locked, folder.glob("*.lock"))):
                remove_tree(folder)
