"""What the planner orders of the server: to be the only one that acts, and what it decides."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dynamo_local.control.client import ControlClient
from dynamo_local.control.operations import BEGIN_PLANNING, SCALE_ENDPOINT, TAKE_ACTION, Operation
from dynamo_local.control.orders import follow
from dynamo_local.core.errors import DynamoError, NotRunningError, UnansweredError, UsageError
from dynamo_local.core.messages.endpoints import EndpointStatus, view_of
from dynamo_local.core.planning.actions import Action, ActionOutcome, OrderOutcome, ScaleEndpoint
from dynamo_local.log_once import LogOnce

_log = logging.getLogger(__name__)

_WITHIN_S = 10.0
"""For each answer, which comes within 5 s unless the server is stopped. A planner that ends waits for it, too."""
_TRY_EVERY_S = 1.0


@dataclass(frozen=True)
class ServerOrders:
    """Orders to the server of a namespace. `change_timeout_s`: for a worker that is added to become ready."""

    server: ControlClient
    change_timeout_s: float

    async def begin_planning(self, *, waits: bool) -> None:
        """Be the planner that acts, as long as this process lives. While another one is, this is refused with
        UsageError, or `waits` until that one ends. Raises NotRunningError, and SupervisorError unless it waits."""
        refusal = LogOnce(_log)
        while True:
            try:
                await self._ask(BEGIN_PLANNING, {"pid": os.getpid()})
                return
            except NotRunningError:
                raise
            except UnansweredError:
                if not waits:
                    raise
            except UsageError as error:
                if not waits:
                    raise
                refusal.warn(f"{error.cause}; this one waits until it ends")
            await asyncio.sleep(_TRY_EVERY_S)

    async def take_action(self, action: Action, max_devices: int, why: str) -> ActionOutcome:
        """Have an action carried out within `max_devices` for all workers, and return its outcome. The server goes on
        with it when this is cancelled.

        A server that was started again is told first that this planner acts. Raises NotRunningError when no server
        runs, SupervisorError when it has ended meanwhile, and what the order ends with, or why it is not begun.
        """
        order = {
            "pid": os.getpid(),
            "action": action,
            "why": why,
            "max_devices": max_devices,
            "ready_timeout_s": self.change_timeout_s,
        }
        following, failure = follow(self.server, TAKE_ACTION, order, _log.info, timeout_s=_WITHIN_S), LogOnce(_log)
        ask = next(following)
        try:
            answer = await _answer(ask, failure)
        except UsageError:
            await self.begin_planning(waits=False)
            answer = await _answer(ask, failure)
        while True:
            try:
                ask = following.send(answer)
            except StopIteration as ended:
                (found,) = ended.value
                break
            answer = await _answer(ask, failure)
        return ActionOutcome(action, found["done"], found["watcher"], found["note"], found["took_s"])

    async def scale(self, order: ScaleEndpoint) -> tuple[OrderOutcome, EndpointStatus | None]:
        """Order numbers of workers of an endpoint. Returns what became of it, and, if it is carried out, the endpoint's
        status after it."""
        fields = {"workers": order.workers, "prefill_workers": order.prefill_workers}
        try:
            return OrderOutcome(True), view_of(await self._ask(SCALE_ENDPOINT, fields, order.name)).status
        except DynamoError as error:
            return OrderOutcome(False, error.cause), None

    async def _ask(self, operation: Operation, fields: Mapping[str, Any], name: str = "") -> Any:
        return await asyncio.to_thread(self.server.do, operation, fields, timeout_s=_WITHIN_S, name=name)


async def _answer(ask: Callable[[], Any], failure: LogOnce) -> Any:
    """Ask about an order until an answer comes: given again, an order is not carried out again."""
    while True:
        try:
            return await asyncio.to_thread(ask)
        except UnansweredError as error:
            failure.warn(f"an action is under way, and {error.cause}")
        await asyncio.sleep(_TRY_EVERY_S)
