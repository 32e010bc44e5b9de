"""The control API of a server: what answers each question; orders that take long, which are answered once they begin,
carried out by tasks of the server, and known by their ids; and the socket that the server's owner alone can open."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dynamo_local.control.errors import ErrorBody, content_of, still_starting
from dynamo_local.control.operations import GET_ORDER, Call, Handler, Handlers, Operation
from dynamo_local.control.orders import OrderView
from dynamo_local.core.errors import (
    DynamoError,
    OrderAbsentError,
    OrderError,
    StateError,
    SupervisorError,
    UnansweredError,
    one_line,
)
from dynamo_local.supervisor.server.reports.report import Report
from dynamo_local.tasks import TaskGuard
from state.files import FILE_MODE, system_errors

if TYPE_CHECKING:
    from dynamo_local.supervisor.control.http import HttpServer

_log = logging.getLogger(__name__)

KEPT = 1000
"""How many orders that have ended are known at most."""
AT_ONCE = 64
_NEWS_WITHIN_S = 5.0

Work = Callable[[Report], Awaitable[Sequence[dict[str, Any]]]]
"""Does what is ordered, and returns an outcome for each change, whose `done` tells whether it was made."""

_WAITING = 256
"""Connections that may wait until the server takes them."""
_END_S = 3.0


@dataclass(frozen=True)
class EventStream:
    """An answer that goes on: server-sent events. A reader that takes nothing for `taken_within_s` is cut."""

    content: AsyncIterator[bytes]
    taken_within_s: float


class ControlApi:
    """The handlers of all operations that can be answered now."""

    def __init__(self) -> None:
        self._handlers: dict[Operation, Handler] = {}

    def take(self, handlers: Handlers) -> None:
        """Have these answer from now on."""
        self._handlers.update(handlers)

    def withdraw(self, operations: Iterable[Operation]) -> None:
        """Have these not be carried out any more: the server stops."""
        self._handlers.update(dict.fromkeys(operations, _stopping))

    def handler(self, operation: Operation) -> Handler:
        """Return what answers. Raises UnansweredError while there is none."""
        found = self._handlers.get(operation)
        if found is None:
            raise still_starting()
        return found


async def _stopping(_: Call) -> None:
    raise UnansweredError("the server is stopping", "see `dynamo ls`")


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


class ControlSocket:
    """The socket on which a control API is answered, from its making until `close`."""

    def __init__(self, api: ControlApi, path: Path) -> None:
        """Bind: clients can connect from now on. Raises StateError."""
        self._api = api
        self._path = path
        self._server: HttpServer | None = None
        self._socket = self._bound()

    def _bound(self) -> socket.socket:
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with system_errors(f"cannot open {self._path}"):
            # The folder is closed to others from before the socket exists.
            bound.bind(str(self._path))
            self._path.chmod(FILE_MODE)
            bound.listen(_WAITING)
        return bound

    def _bound_again(self) -> socket.socket | None:
        """Bind if the file was removed; None if it is there, or its folder is not there yet."""
        with suppress(StateError):
            return None if self._path.exists() else self._bound()
        return None

    async def run(self) -> None:
        """Answer until `close`."""
        self._server = await asyncio.to_thread(self._make_server)
        await self._server.serve([self._socket])

    def _make_server(self) -> HttpServer:
        # Here, in a thread: the import takes a fifth of a second, for which no process of the server is to wait.
        from dynamo_local.supervisor.control.http import HttpServer

        return HttpServer(self._api, self._bound_again)

    async def close(self, running: asyncio.Task[None]) -> None:
        """Take no more questions, and finish those under way, for a while. `running`: runs `run`."""
        if self._server is not None:
            self._server.should_exit = True
            await asyncio.wait({running}, timeout=_END_S)
        running.cancel()
        await asyncio.wait({running}, timeout=_END_S)
        self._socket.close()
