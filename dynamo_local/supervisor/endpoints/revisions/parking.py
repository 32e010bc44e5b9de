"""Asks workers to park, and to take requests again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import BusDownError, BusError, DecodeError, NobodyListensError
from dynamo_local.core.fleet.view import FleetView
from dynamo_local.core.messages.admin import ParkAnswer, ParkQuestion
from dynamo_local.core.names import Revision
from dynamo_local.core.subjects import Subjects

_ANSWERED_WITHIN_S = 10.0


@dataclass(frozen=True)
class NotDone:
    """Why a worker is not as asked. `reached`: False if the question did not come to it: its process has ended, say,
    and is started again."""

    why: str
    reached: bool = True


@dataclass(frozen=True)
class Parking:
    """Asks the workers of one server over the bus."""

    bus: Bus
    namespace: str

    async def ask(self, revision: Revision, leases: Mapping[str, str], *, parked: bool) -> dict[str, NotDone]:
        """Ask workers side by side, and return why some are not as asked, by watcher. `leases`: by watcher."""
        answers = await asyncio.gather(*(self._ask(revision, lease, parked=parked) for lease in leases.values()))
        return {watcher: each for watcher, each in zip(leases, answers, strict=True) if each is not None}

    async def _ask(self, revision: Revision, lease: str, *, parked: bool) -> NotDone | None:
        """Why the worker is not as asked; None if it is."""
        subject = Subjects(self.namespace, str(revision)).parking(lease)
        try:
            answer = await self.bus.ask(subject, ParkQuestion(parked), ParkAnswer, timeout_s=_ANSWERED_WITHIN_S)
        except (NobodyListensError, BusDownError) as error:
            return NotDone(str(error), reached=False)
        except (BusError, DecodeError) as error:
            return NotDone(str(error))
        if answer.parked == parked:
            return None
        return NotDone(answer.refused or ("it stays awake" if parked else "it stays parked"))


async def answers_of(
    asking: Awaitable[dict[str, NotDone]],
    leases: Mapping[str, str],
    view: Callable[[], FleetView],
    heard: asyncio.Event,
) -> dict[str, NotDone]:
    """Why workers are not as asked. `asking`: by `Parking.ask`; `heard` is set whenever `view` changes.

    A process that was killed with the question answers nothing. Its worker has not been reached: that is known once
    another process announces itself for it, or the old one is heard no more. The first of these is not waited for any
    longer than that.
    """
    known = {one.lease for one in view().members()}

    def is_anew(watcher: str) -> bool:
        return any(one.watcher == watcher and one.lease not in known for one in view().members())

    answers = asyncio.ensure_future(asking)
    answers.add_done_callback(lambda _: heard.set())
    try:
        await until(lambda: answers.done() or all(map(is_anew, leases)), heard, 2 * _ANSWERED_WITHIN_S)
        found = answers.result() if answers.done() else dict.fromkeys(leases, NotDone("it has not answered"))
    finally:
        answers.cancel()
    there = {one.lease for one in view().members()}
    gone = {watcher for watcher, lease in leases.items() if lease not in there or is_anew(watcher)}
    return {name: replace(each, reached=each.reached and name not in gone) for name, each in found.items()}


async def until(is_so: Callable[[], bool], changed: asyncio.Event, within_s: float) -> bool:
    """Wait until something is so, looking whenever `changed` is set. Returns whether it is."""
    try:
        async with asyncio.timeout(within_s):
            while not is_so():
                changed.clear()
                await changed.wait()
    except TimeoutError:
        return is_so()
    return True
