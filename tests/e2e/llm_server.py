"""A `dynamo serve` of a language model, seen from outside."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.subjects import Subjects
from dynamo_local.tasks import TaskGuard
from state.machine.processes import alive, descendants, pids, start_time
from tests.integration.server_process import ServerProcess, parent_of

READY_WITHIN_S = 400.0
"""Engines load; other work on the machine makes them slow, and slow is no failure."""

PATIENCE_S = 240.0
"""For one answer, on a machine that has other things to do."""

COMMAND = [sys.executable, "-m", "dynamo_local.cli.main"]


GIVEN = dict(os.environ)
"""The environment of servers. Tests that import vLLM, and run engines of it, change that of this process later."""

ROLES = frozenset({"aggregated", "decode", "prefill"})
"""Of the processes that hold an engine."""


class LlmServer(ServerProcess):
    """Serves on a free port; `url` is known once it is ready."""

    def __init__(self, root: Path, namespace: str, options: list[str], *, imports: bool = False) -> None:
        arguments = ["-m", "dynamo_local.cli.main", "serve", *options, "--port=0", f"--namespace={namespace}"]
        own = {name: value for name, value in os.environ.items() if name.startswith("DYN_")}
        super().__init__(root, namespace, arguments, environ=GIVEN | own, imports=imports)
        self.url = ""

    def await_ready(self) -> None:
        """Wait for the line that says where the API is."""
        line = self.line("API ready at", within_s=READY_WITHIN_S)
        self.url = line.partition("API ready at ")[2].split()[0]

    def command(self, *arguments: str) -> str:
        """Standard output of another `dynamo` command on the same namespace."""
        namespace = ["--namespace", self.paths.namespace]
        done = subprocess.run(
            [*COMMAND, *arguments, *namespace],
            env=dict(self.environ),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def tree(self) -> dict[int, int]:
        """All processes of the server: pid to start time. (vLLM's overwrite the environment that marks them, and a fork
        server may be a fork of tests/imported.py.)"""
        roots = {self.process.pid, *(process.pid for process in self.processes())}
        found = {pid for root in roots for pid in descendants(root)}
        return {pid: started for pid in found if (started := start_time(pid)) is not None}

    def ps(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(self.command("ps", "--json"))
        return rows

    def await_workers(self, number: int) -> None:
        """Wait until so many workers are ready. Those that are dead and not missed yet do not count."""

        def ready(workers: list[Presence]) -> bool:
            return sum(w.state == "ready" and start_time(w.pid) is not None for w in workers) == number

        # In a thread of its own: the test may have an event loop.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(asyncio.run, self.until(ready, f"there are not {number} workers")).result()

    async def until(self, condition: Callable[[list[Presence]], bool], what: str) -> None:
        """Watch the workers' presences until they meet a condition."""
        bus = await Bus.connect(BusAddress.load(self.paths.bus_file), name="test")
        changed = asyncio.Event()
        watch = FleetWatch(bus, Subjects(self.paths.namespace, FIRST_OF_MAIN))
        watch.subscribe(lambda _: changed.set())
        await watch.start()
        tasks = TaskGuard()
        # Without it, who has left would be seen for ever.
        tasks.spawn("fleet", watch.run())
        try:
            async with asyncio.timeout(READY_WITHIN_S):
                while not condition([p for p in watch.view.members() if p.role in ROLES]):
                    changed.clear()
                    # Looked at now and then in any case: a condition may depend on more than presences.
                    with suppress(TimeoutError):
                        await asyncio.wait_for(changed.wait(), 0.5)
        except TimeoutError:
            raise AssertionError(f"{what}: {watch.view.members()}") from None
        finally:
            await tasks.close()
            await bus.close()


def child(parent: int, name: str) -> int:
    """The child of a process that calls itself so."""
    (found,) = [pid for pid in pids() if parent_of(pid) == parent and name in command_of(pid)]
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def none_of(processes: dict[int, int]) -> bool:
    """Whether all these processes have ended."""
    return not any(alive(pid, started) for pid, started in processes.items())


def settled(workers: list[Presence]) -> bool:
    """All workers are there, ready, run nothing, and no KV block is used or kept for others."""
    return len(workers) == 2 and all(
        w.state == "ready"
        and w.load is not None
        and w.load.running == 0
        and w.load.waiting == 0
        and w.load.kv_usage == 0
        and not w.load.kv_pinned
        for w in workers
    )
