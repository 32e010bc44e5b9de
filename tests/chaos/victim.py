"""A second frontend in a process that faults kill, and the class that restarts it."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.subjects import Subjects
from dynamo_local.process.ancestry import die_with_parent
from state.machine.processes import Process
from tests.chaos.faults import Done
from tests.chaos.frontend import ChaosFrontend
from tests.chaos.processes import identity_of, send
from tests.chaos.results import Results
from tests.chaos.settings import NAMESPACE, ChaosSettings

STREAMS = 16
WATCHER = f"{NAMESPACE}_Frontend_1"

_TELL_EVERY_S = 0.5
_START_AGAIN_S = 0.5
_LINE_LIMIT = 1 << 22


class Victim:
    """Runs a second frontend, and restarts it whenever it is killed. Sums the results that its processes report."""

    def __init__(self, bus_file: Path, settings: ChaosSettings) -> None:
        self.results = Results()
        self.deaths = 0
        self._bus_file = bus_file
        self._settings = settings
        self._identity: Process | None = None
        self._told = Results()
        self._told_to: asyncio.StreamWriter | None = None
        self._ending = False

    def kill(self) -> bool:
        """Kill the frontend. Returns whether it was running, with requests."""
        if self._identity is None or not self._told.requests:
            return False
        # Not by asyncio's handle: its kill() polls the process, and would take the exit code from `process.wait()`.
        if not send(self._identity, signal.SIGKILL):
            return False
        self.deaths += 1
        # Counted now and reset, so that the next process must have reported requests before it is killed.
        self._count_told()
        return True

    async def run(self) -> None:
        """Start the frontend, and restart it until `end`."""
        number = 0
        while not self._ending:
            number += 1
            settings = self._settings
            arguments = [str(self._bus_file), str(settings.stall_s), f"{settings.seed} victim {number}"]
            arguments.append(str(settings.gap_slack_s))
            if settings.longest_local_prefill is not None:
                arguments.append(str(settings.longest_local_prefill))
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tests.chaos.victim",
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                cwd=Path(__file__).parents[2],
                limit=_LINE_LIMIT,
            )
            self._identity = identity_of(process.pid)
            assert process.stdout is not None
            self._told_to = process.stdin
            while line := await process.stdout.readline():
                with suppress(msgspec.DecodeError):
                    self._told = msgspec.json.decode(line, type=Results)
            code = await process.wait()
            self._identity = None
            # SIGTERM may arrive before the process handles it: then it has sent no request yet.
            unborn = code == -signal.SIGTERM and not self._told.requests
            self._count_told()
            if code not in (0, -signal.SIGKILL) and not unborn:
                self.results.failures.append(f"the second frontend ended with {code}")
            if not self._ending:
                await asyncio.sleep(_START_AGAIN_S)

    def tell(self, fault: Done) -> None:
        """Report a fault to the process, if it is running."""
        if self._told_to is not None and self._identity is not None and not self._told_to.is_closing():
            self._told_to.write(msgspec.json.encode(fault) + b"\n")

    def end(self) -> None:
        """Let the process finish its requests and end."""
        self._ending = True
        if self._identity is not None:
            send(self._identity, signal.SIGTERM)

    def _count_told(self) -> None:
        self.results, self._told = self.results.plus(self._told), Results()


async def _main(
    bus_file: Path, stall_s: float, seed: str, gap_slack_s: float, max_local_prefill_length: int | None = None
) -> None:
    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    bus = await Bus.connect(BusAddress.load(bus_file), name=WATCHER, deadline_s=60)
    frontend = ChaosFrontend(
        bus, Subjects(NAMESPACE, FIRST_OF_MAIN), WATCHER, stall_s, max_local_prefill_length, gap_slack_s
    )
    await frontend.start()
    frontend.open_streams(STREAMS, seed)
    frontend.tasks.spawn("faults", _hear_of_faults(frontend))
    failed = asyncio.create_task(frontend.tasks.failed())
    while not ending.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(ending.wait(), _TELL_EVERY_S)
        if failed.done():
            failed.result()
        _tell(frontend.results)
    unanswered = await frontend.close_streams(stall_s)
    results = frontend.results
    results.failures += [f"second frontend: {unanswered} unanswered"] if unanswered else []
    results.failures += [f"second frontend: {what}" for what in frontend.left_over()]
    _tell(results)
    await frontend.tasks.close()
    await bus.close()


async def _hear_of_faults(frontend: ChaosFrontend) -> None:
    """Record the faults that arrive on standard input, a line each."""
    loop, lines = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        frontend.record_fault(msgspec.json.decode(line, type=Done))


def _tell(results: Results) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(results) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    die_with_parent()
    logging.basicConfig(level=logging.ERROR)
    asyncio.run(_main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3], float(sys.argv[4]), *map(int, sys.argv[5:])))
