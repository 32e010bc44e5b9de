"""Orders that take long: each is answered when it is begun, carried out by a task of the server, known by its id."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from dynamo_local.control.errors import ErrorBody, content_of
from dynamo_local.control.operations import GET_ORDER, Call, Handlers
from dynamo_local.control.orders import OrderView
from dynamo_local.core.errors import DynamoError, OrderAbsentError, OrderError, SupervisorError, one_line
from dynamo_local.supervisor.server.reports.report import Report
from dynamo_local.tasks import TaskGuard

_log = logging.getLogger(__name__)

KEPT = 1000
"""How many orders that have ended are known at most."""
AT_ONCE = 64
_NEWS_WITHIN_S = 5.0

Work = Callable[[Report], Awaitable[Sequence[dict[str, Any]]]]
"""Does what is ordered, and returns an outcome for each change, whose `done` tells whether it was made."""


@dataclass
class _Order:
    """An order, and the report of who carries it out. `asked`: two orders of one id must not differ in it."""

    id: str
    command: str
    asked: Any
    state: Literal["running", "done", "failed"] = "running"
    steps: list[str] = field(default_factory=list)
    outcomes: Sequence[dict[str, Any]] = ()
    error: ErrorBody | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def step(self, text: str) -> None:
        self.steps.append(text)
        self._tell()

    say = pending = step

    def end(self, outcomes: Sequence[dict[str, Any]], error: DynamoError | None) -> None:
        self.outcomes, self.error = outcomes, None if error is None else content_of(error).error
        self.state = "done" if error is None and all(one["done"] for one in outcomes) else "failed"
        self._tell()

    def view(self, after: int = 0) -> OrderView:
        return OrderView(self.id, self.command, self.state, self.steps[after:], self.outcomes, self.error)

    def _tell(self) -> None:
        self.news.set()
        self.news = asyncio.Event()


class Orders:
    """The orders of one server. `tasks`: carry them out; those that are cancelled leave the rest to whoever finishes
    what is half done."""

    def __init__(self, tasks: TaskGuard) -> None:
        self._tasks = tasks
        self._orders: dict[str, _Order] = {}

    @property
    def handlers(self) -> Handlers:
        return {GET_ORDER: self.get}

    def knows(self, order_id: str) -> bool:
        """Whether an order of that id is being carried out, or was."""
        return order_id in self._orders

    def begin(self, command: str, call: Call, order_id: str, work: Work) -> OrderView:
        """Begin to carry out an order, or return how far it is if it is known by its id. Raises OrderError,
        SupervisorError."""
        asked = (command, dict(call.names), call.body)
        known = self._orders.get(order_id)
        if known is not None:
            if known.asked != asked:
                raise OrderError(f"another order has the id {order_id}", param="id")
            return known.view()
        ended = [order.id for order in self._orders.values() if order.state != "running"]
        if len(self._orders) - len(ended) >= AT_ONCE:
            raise SupervisorError(f"{AT_ONCE} orders are being carried out", "try again when one has ended")
        for each in ended[:-KEPT]:
            del self._orders[each]
        order = _Order(order_id or secrets.token_hex(8), command, asked)
        self._orders[order.id] = order
        self._tasks.spawn(f"order {command}", self._carry_out(order, work))
        return order.view()

    async def get(self, call: Call) -> OrderView:
        order = self._orders.get(call.names["id"])
        if order is None:
            raise OrderAbsentError(f"no order has the id {call.names['id'][:60]!r}", "see `dynamo events`")
        after = call.number("after", 0)
        if "after" in call.query and order.state == "running" and len(order.steps) <= after:
            with suppress(TimeoutError):
                async with asyncio.timeout(_NEWS_WITHIN_S):
                    await order.news.wait()
        return order.view(after)

    async def _carry_out(self, order: _Order, work: Work) -> None:
        outcomes: Sequence[dict[str, Any]] = ()
        failure: DynamoError | None = SupervisorError("the server is stopping", "what runs ends with it")
        try:
            outcomes, failure = await work(order), None
        except DynamoError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - an order that fails in a new way is no reason to end all that runs
            _log.exception("an order has failed: %s", order.command)
            failure = SupervisorError(f"{type(error).__name__}: {one_line(error)}", "see the log")
        finally:
            order.end(outcomes, failure)
