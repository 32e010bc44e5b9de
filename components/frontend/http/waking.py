"""Requests that wait for a worker of their model: their line, and the waking of the endpoint for which they wait."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from dynamo_local.control.client import ControlClient
from dynamo_local.control.operations import WAKE_ENDPOINT
from dynamo_local.core.errors import DynamoError, NotRunningError, UnansweredError
from dynamo_local.core.histogram import Histogram
from dynamo_local.core.http.waiting import (
    AGAIN_S,
    Asking,
    Held,
    Idle,
    Unready,
    idle_as,
    is_waking,
    judged,
    may_be_tried,
)
from dynamo_local.core.messages.endpoints import EndpointView
from dynamo_local.core.priority.classes import Occupancy
from dynamo_local.core.priority.fair_queue import Claim, in_turn
from dynamo_local.log_once import LogOnce
from state.paths import StatePaths

_log = logging.getLogger(__name__)

_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Line:
    """The requests that are held for one model."""

    def __init__(self) -> None:
        self._waiting: dict[Held, asyncio.Future[None] | None] = {}
        self.sequences, self.requests = Occupancy(), Occupancy()
        """How many are held, by class and key."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> list[Held]:
        """The requests, the oldest first."""
        return list(self._waiting)

    def join(self, held: Held) -> None:
        """Count a request as held."""
        self._waiting[held] = None
        self._count(held, 1)

    def leave(self, held: Held) -> None:
        """Count it no more."""
        del self._waiting[held]
        self._count(held, -1)

    def _count(self, held: Held, times: int) -> None:
        self.sequences.add(held.priority, held.key, times * held.sequences)
        self.requests.add(held.priority, held.key, times)

    def wake(self) -> None:
        """Have all requests look again, in the order in which an engine would serve them."""
        for held in in_turn(self._waiting, _claim, lambda held: held.sequences):
            if (future := self._waiting[held]) is not None and not future.done():
                future.set_result(None)

    async def wait(self, held: Held, ends: Collection[asyncio.Future[None]], timeout_s: float) -> None:
        """Wait until the line is woken, one of `ends` is done, or the time is over."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[held] = future
        try:
            await asyncio.wait({future, *ends}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiting[held] = None


def _claim(held: Held, number: int) -> Claim:
    return Claim(held.priority, held.since, number, held.key)


class HoldTimes:
    """How long requests were held, by model, by how its endpoint was idle, and by what became of them."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str], Histogram] = {}

    @property
    def histograms(self) -> Mapping[tuple[str, str, str], Histogram]:
        """Seconds by (model, "parked", "asleep" or "no", "served", "refused" or "left")."""
        return self._found

    def note(self, model: str, woken_from: str, outcome: str, held_s: float) -> None:
        """Count a request that is held no more."""
        series = model, woken_from or "no", outcome
        self._found.setdefault(series, Histogram(_BOUNDS_S)).observe(held_s)


ANSWER_S = 2.0
"""Time for the server to answer. It answers before the endpoint is awake."""
_AT_ONCE = 8


class WakingServer:
    """Asks the server of a namespace to wake endpoints, in threads of its own: those that wait for a server that is
    stopped hold up no other work of the frontend."""

    def __init__(self, paths: StatePaths) -> None:
        self._client = ControlClient(paths)
        self._threads = ThreadPoolExecutor(_AT_ONCE, "waking")

    async def wake(self, name: str) -> str:
        """Ask once. Returns why the server refuses; empty: it wakes the endpoint. Raises NotRunningError,
        UnansweredError."""

        def ask() -> None:
            self._client.do(WAKE_ENDPOINT, query={"asked": "true"}, timeout_s=ANSWER_S, name=name)

        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        except (NotRunningError, UnansweredError):
            raise
        except DynamoError as error:
            return str(error)
        return ""


@dataclass(frozen=True)
class WorkersHere:
    """What this frontend sees of an endpoint's workers. `parked`: one of them is. `ready`: one of them is, or the
    frontend cannot serve the endpoint anyway. `lacking`: a request that had gone on has no worker any more."""

    parked: bool = False
    ready: bool = False
    lacking: bool = False


Spawn = Callable[[str, Coroutine[Any, Any, None]], asyncio.Task[Any]]


class Waking:
    """The waking of one endpoint. `lines`: the requests that are held for it, those for its adapters included."""

    def __init__(
        self,
        name: str,
        server: WakingServer,
        view: Callable[[], EndpointView | None],
        workers: Callable[[], WorkersHere],
        spawn: Spawn,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name`: of the endpoint. `view` and `workers` return what is known of it now."""
        self.lines: WeakSet[Line] = WeakSet()
        self._name = name
        self._server = server
        self._view = view
        self._workers = workers
        self._spawn = spawn
        self._clock = clock
        self._asking = Asking()
        self._was: Idle | None = None
        self._knocked = False
        self._changed = asyncio.Event()
        self._task: asyncio.Task[Any] | None = None
        self._log_once = LogOnce(_log)

    @property
    def is_idle(self) -> bool:
        """Whether the endpoint gets a worker by being asked for."""
        return self._idle() is not None

    @property
    def woken_from(self) -> Idle | None:
        """How the endpoint is idle, or was until it began to wake."""
        return self._idle() or self._was

    def look(self) -> None:
        """Ask if a request waits for the endpoint, and that helps. To be called whenever that may have changed."""
        idle = self._idle()
        if idle is not None or not self._is_waking():
            self._was = idle
        if self._task is not None:
            self._changed.set()
        elif self._needed():
            self._begin()

    def knock(self) -> None:
        """Ask once, for a request that cannot be held as it is."""
        if self._concerned() and self._asking.outcome != "asked" and not self._asking.is_recent(self._clock()):
            self._knocked = True
            # Whoever looks before the task does is to know.
            self._asking = self._asking.begun(self._clock())
            self._changed.set()
            if self._task is None:
                self._begin()

    def judged(self, unready: Unready) -> Unready:
        """What those are told who wait. `unready`: as it is without what the server has answered."""
        return judged(unready, self._asking, self._clock()) if self._concerned() else unready

    def _idle(self) -> Idle | None:
        """How the endpoint is idle; None: it is not, or could not be served if it were woken."""
        workers = self._workers()
        return None if workers.ready else idle_as(self._view(), parked=workers.parked)

    def _is_waking(self) -> bool:
        """Whether it comes up for those who ask for it."""
        return not self._workers().ready and is_waking(self._view())

    def _may_be_tried(self) -> bool:
        """Whether it has failed to wake, and may be tried again."""
        return not self._workers().ready and may_be_tried(self._view())

    def _concerned(self) -> bool:
        return self._idle() is not None or self._may_be_tried()

    def _needed(self) -> bool:
        if not self._knocked and not any(map(len, self.lines)) and not self._workers().lacking:
            return False
        return self._knocked or self._idle() is not None or self._is_waking()

    def _begin(self) -> None:
        self._task = self._spawn(f"waking {self._name}", self._run())

    async def _run(self) -> None:
        try:
            while self._needed():
                self._knocked = False
                await self._ask_once()
                with suppress(TimeoutError):
                    async with asyncio.timeout(AGAIN_S):
                        while self._needed() and not self._knocked:
                            self._changed.clear()
                            await self._changed.wait()
        finally:
            self._task = None

    async def _ask_once(self) -> None:
        self._asking = self._asking.begun(self._clock())
        try:
            refused = await self._server.wake(self._name)
        except (NotRunningError, UnansweredError) as error:
            why = f"the server does not answer this frontend: {error.cause}"
            self._asking = self._asking.unanswered(why, self._clock())
            self._log_once.warn(f"endpoint {self._name} is not woken yet: {why}")
        else:
            self._asking = self._asking.answered(refused, self._clock())
            self._log_once.clear()
            if not refused:
                _log.info("endpoint %s was asked for, and is to wake", self._name)
            else:
                _log.warning("endpoint %s is not woken: %s", self._name, self._asking.why)
        for line in self.lines:
            line.wake()
