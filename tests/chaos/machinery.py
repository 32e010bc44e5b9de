"""Faults of what keeps the services, and of what is around them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from state.paths import StatePaths
from state.processes import Process
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
    """What a fault is done to, and what has to go on until it is over."""

    target: str
    lasting: Coroutine[Any, Any, None] | None = None


class Machinery:
    """Of one server. What is None cannot be had here: its faults find no target."""

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
        """Do the fault; None: there is nothing to do it to now."""
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
        """The one that this server has now."""
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
    """Let stopped processes go on after so long."""
    try:
        await asyncio.sleep(seconds)
    finally:
        for process in processes:
            send(process, signal.SIGCONT)


def machinery_of(serve_pid: int, paths: StatePaths, clock: SteppedClock | None) -> Machinery:
    """With what can be filled up here: private file systems."""
    disk = private.disk()
    if disk is None:
        return Machinery(serve_pid, paths, clock=clock)
    return Machinery(serve_pid, paths, Filler(disk), Filler(private.SHM), clock)


def clock_for(settings: ChaosSettings, folder: Path) -> AbstractContextManager[SteppedClock | None]:
    """A clock to be stepped, if it is to be."""
    step = wanted(Kind.STEP_CLOCK, settings.only, settings.without)
    return stepped_clock(folder) if step else nullcontext()
