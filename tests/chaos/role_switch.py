"""Switches a decode worker to the prefill role for a while, as `dynamo role` does."""

from __future__ import annotations

import asyncio
import logging

from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.errors import BusError
from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.messages.admin import RoleAnswer, RoleQuestion
from dynamo_local.core.subjects import Subjects

DECODE_ROLE = "decode"

_log = logging.getLogger(__name__)

_ANSWER_S = 2.0
_AGAIN_S = 0.2
_BACK_WITHIN_S = 60.0


class RoleSwitch:
    """Switches roles of the workers of a graph with a prefill queue."""

    def __init__(self, bus: Bus, subjects: Subjects, fleet: FleetWatch) -> None:
        self._bus = bus
        self._subjects = subjects
        self._fleet = fleet

    async def switch(self, watcher: str, seconds: float) -> None:
        """Switch a worker to prefill for `seconds`, then back to decode, repeating the request until it succeeds."""
        await self._take_up(watcher, PREFILL_ROLE)
        await asyncio.sleep(seconds)
        async with asyncio.timeout(_BACK_WITHIN_S):
            while not await self._take_up(watcher, DECODE_ROLE):  # noqa: ASYNC110  # no event says that it may succeed
                await asyncio.sleep(_AGAIN_S)

    async def _take_up(self, watcher: str, role: str) -> bool:
        """Ask for the role, and return whether the worker has it. Without the bus there is no answer."""
        lease = next((each.lease for each in self._fleet.view.members() if each.watcher == watcher), None)
        if lease is None:
            return False
        try:
            answer = await self._bus.ask(
                self._subjects.role(lease), RoleQuestion(role), RoleAnswer, timeout_s=_ANSWER_S
            )
        except BusError as error:
            _log.info("%s cannot be asked to take the role %s: %s", watcher, role, error)
            return False
        return answer.role == role
