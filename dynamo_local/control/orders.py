"""Orders that a server carries out after it has answered: what it tells of them, and how they are followed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from dynamo_local.control.client import ANSWER_S, ControlClient
from dynamo_local.control.errors import ErrorBody, error_of
from dynamo_local.control.operations import GET_ORDER, Operation
from dynamo_local.core.errors import SupervisorError, UsageError


class OrderView(msgspec.Struct, frozen=True):
    """An order as answers have it. `steps`: what was done so far, without what whoever asks has seen. `outcomes`: one
    for each change, once the order has ended. `error`: why no more was done."""

    id: str
    command: str
    state: Literal["running", "done", "failed"]
    steps: Sequence[str] = ()
    outcomes: Sequence[dict[str, Any]] = ()
    error: ErrorBody | None = None
    object: Literal["order"] = "order"

    @property
    def result(self) -> Sequence[dict[str, Any]]:
        """The outcomes of an order that has ended. Raises the error with which it ended, if it did with one."""
        if self.error is not None:
            raise error_of(self.error.code, msgspec.json.encode({"error": self.error}))
        return self.outcomes


def carry_out(
    client: ControlClient,
    operation: Operation,
    fields: Mapping[str, Any],
    step: Callable[[str], None],
    *,
    watcher: str = "",
) -> Sequence[dict[str, Any]]:
    """Give an order, follow it to its end, and return its outcomes. `step` is called with each step.

    Raises as `ControlClient.do`, and the error with which the order ends. Who is interrupted leaves the order to the
    server.
    """
    following = follow(client, operation, fields, step, watcher=watcher)
    answer = next(following)()
    try:
        while True:
            answer = following.send(answer)()
    except StopIteration as ended:
        outcomes: Sequence[dict[str, Any]] = ended.value
        return outcomes
    except KeyboardInterrupt:
        step("interrupted: the server goes on with it, and `dynamo events` shows the outcome")
        raise


def follow(
    client: ControlClient,
    operation: Operation,
    fields: Mapping[str, Any],
    step: Callable[[str], None],
    *,
    timeout_s: float = ANSWER_S,
    watcher: str = "",
) -> Generator[Callable[[], Any], Any, Sequence[dict[str, Any]]]:
    """Follow an order from being given to its end. Yields what asks the server next, which blocks and may be done again
    if no answer comes, and is sent the answer. Returns the outcomes, or raises the error with which the order ends.
    `step` is called with each step."""
    asked = {**fields, "id": secrets.token_hex(8)}
    ask = partial(client.do, operation, asked, timeout_s=timeout_s, watcher=watcher)
    seen = 0
    while True:
        view = msgspec.convert((yield ask), OrderView)
        for text in view.steps:
            step(text)
        seen += len(view.steps)
        if view.state != "running":
            return view.result
        ask = partial(_look, client, view.id, seen, timeout_s)


def _look(client: ControlClient, order: str, seen: int, timeout_s: float) -> Any:
    try:
        return client.do(GET_ORDER, query={"after": str(seen)}, timeout_s=timeout_s, id=order)
    except UsageError as error:
        # No server runs, or another one, which does not know the order.
        raise SupervisorError("the server has ended meanwhile", "`dynamo ls` shows the servers that run") from error
