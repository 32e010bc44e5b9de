"""Faults of the supervisor (circusd, dynamo serve, statefile) and of its surroundings (disk, /dev/shm, clock)."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from state.machine.processes import Process
from state.paths import StatePaths
from tests.chaos.faults import Draw, Kind, wanted
from tests.chaos.processes import children, command_of, identity_of, send
from tests.chaos.settings import ChaosSettings
from tests.chaos.surroundings import private
from tests.chaos.surroundings.clock import SteppedClock, stepped_clock
from tests.chaos.surroundings.filling import Filler

_LONGEST_STOP_S = 12.0
_LONGEST_DRAW_S = 6.0
_LONGEST_STEP_S = 86400.0
_FULL_AT_MOST_S = 3.0


@dataclass(frozen=True)
class Begun:
    """A fault that has begun: its target, and what remains to run until it is over."""

    target: str
    lasting: Coroutine[Any, Any, None] | None = None


class Machinery:
    """Injects these faults into a server. Faults whose means are None on this machine find no target."""

    def __init__(
        self,
        serve_pid: int,
        paths: StatePaths,
        disk: Filler | None = None,
        shm: Filler | None = None,
        clock: SteppedClock | None = None,
    ) -> None:
        self._serve_pid = serve_pid
        self._paths = paths
        self._disk = disk
        self._shm = shm
        self._clock = clock

    def begin(self, draw: Draw) -> Begun | None:
        """Inject a fault; None: no target is available now."""
        match draw.kind:
            case Kind.KILL_CIRCUSD | Kind.STOP_CIRCUSD:
                return self._signal(self.circusd(), "circusd", draw)
            case Kind.STOP_SERVE:
                return self._signal(identity_of(self._serve_pid), "dynamo serve", draw)
            case Kind.DAMAGE_STATEFILE:
                return self._damage(draw.target)
            case Kind.STEP_CLOCK:
                return self._step(draw.target)
            case _:
                return self._fill(draw)

    def circusd(self) -> Process | None:
        """Return the server's present circusd; None if there is none."""
        found = [each for each in children(self._serve_pid) if b"circusd" in command_of(each.pid)]
        return found[0] if found else None

    def _signal(self, process: Process | None, name: str, draw: Draw) -> Begun | None:
        kill = draw.kind is Kind.KILL_CIRCUSD
        if process is None or not send(process, signal.SIGKILL if kill else signal.SIGSTOP):
            return None
        seconds = draw.seconds * _LONGEST_STOP_S / _LONGEST_DRAW_S
        return Begun(name, None if kill else resume([process], seconds))

    def _damage(self, share: float) -> Begun | None:
        """Damage the statefile: empty it but for a brace, remove it, or cut it at any byte."""
        statefile = self._paths.statefile
        try:
            whole = statefile.read_bytes()
        except FileNotFoundError:
            return None
        cut = int((share * 5 % 1) * len(whole))
        match int(share * 5):
            case 0:
                statefile.write_text("{\n")
            case 1:
                statefile.unlink()
            case _:
                statefile.write_bytes(whole[:cut])
        return Begun(statefile.name)

    def _step(self, share: float) -> Begun | None:
        if self._clock is None:
            return None
        self._clock.step(round((2 * share - 1) * _LONGEST_STEP_S))
        return Begun("the wall clock")

    def _fill(self, draw: Draw) -> Begun | None:
        filler = self._disk if draw.kind is Kind.FILL_DISK else self._shm
        if filler is None:
            return None
        return Begun(draw.kind.value, filler.fill(min(draw.seconds, _FULL_AT_MOST_S)))


async def resume(processes: list[Process], seconds: float) -> None:
    """Let stopped processes go on after `seconds`."""
    try:
        await asyncio.sleep(seconds)
    finally:
        for process in processes:
            send(process, signal.SIGCONT)


def machinery_of(serve_pid: int, paths: StatePaths, clock: SteppedClock | None) -> Machinery:
    """Return the faults of a server. Only private file systems are filled up."""
    disk = private.disk()
    if disk is None:
        return Machinery(serve_pid, paths, clock=clock)
    return Machinery(serve_pid, paths, Filler(disk), Filler(private.SHM), clock)


def clock_for(settings: ChaosSettings, folder: Path) -> AbstractContextManager[SteppedClock | None]:
    """Return a context with a clock that can be stepped, if such faults are wanted."""
    step = wanted(Kind.STEP_CLOCK, settings.only, settings.without)
    return stepped_clock(folder) if step else nullcontext()
