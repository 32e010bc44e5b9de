"""What the journal of an asynchronous task tells of it. Pure.

A journal (core/answers/records.py) has the task's head, its body, a note that it was begun, its result, and the calls
of its receiver. The first result is the result.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from dynamo_local.core.answers.records import Kind, Record, record
from dynamo_local.core.errors import DecodeError

TASK_ID = re.compile(r"task_[0-9a-f]{32}")
"""What the id of a task looks like, whole. The first 12 digits are when it was created, in ms, so that ids are in the
order of creation."""

Status = Literal["PENDING", "STARTED", "SUCCESS", "FAILURE", "UNDEFINED"]
"""As in LLM Engine. `UNDEFINED`: what is kept of the task cannot be read."""

CallbackStatus = Literal["PENDING", "DELIVERED", "FAILED"]

CANCELLED = 499
"""Status of a task that was cancelled."""

_SHOWN = 2000


class TaskHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of a task when it is created. `created_at`: in seconds since 1970. `callback_url`: who is to be
    called with the result; empty: nobody. `callback_auth`: the header Authorization of that call."""

    task: str
    model: str
    path: str
    priority: int
    created_at: int
    callback_url: str = ""
    callback_auth: str | None = None


class TaskResult(msgspec.Struct, frozen=True):
    """How a task ended. `status`: of the answer, as HTTP has it; `body`: its body; `at`: in seconds since 1970."""

    status: int
    body: bytes
    at: int


class Call(msgspec.Struct, frozen=True):
    """A call of the receiver. `outcome`: in words. `is_last`: no further one is made. `at`: in seconds since 1970."""

    outcome: str
    is_delivered: bool
    is_last: bool
    at: int


@dataclass(frozen=True)
class Task:
    """A task as far as its journal tells. `body`: of its request. `calls`: of its receiver, that have ended."""

    head: TaskHead
    body: bytes
    is_started: bool = False
    result: TaskResult | None = None
    calls: tuple[Call, ...] = ()

    @property
    def callback(self) -> CallbackStatus | None:
        """How far the callback is; None: there is none."""
        if not self.head.callback_url:
            return None
        if not self.calls or not self.calls[-1].is_last:
            return "PENDING"
        return "DELIVERED" if self.calls[-1].is_delivered else "FAILED"

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left to be done."""
        return self.result is not None and self.callback != "PENDING"

    @property
    def status(self) -> Status:
        if self.result is not None:
            return "SUCCESS" if self.result.status < 400 else "FAILURE"
        return "STARTED" if self.is_started else "PENDING"

    def shown(self) -> dict[str, Any]:
        """Return the task as LLM Engine's clients know one (GetAsyncTaskV1Response)."""
        result, is_failure = self.result, self.status == "FAILURE"
        return {
            "task_id": self.head.task,
            "status": self.status,
            "result": None if result is None or is_failure else _json(result.body),
            "traceback": _message(result.body) if result is not None and is_failure else None,
            "status_code": None if result is None else result.status,
        }

    def shown_to_owner(self) -> dict[str, Any]:
        """Return the same with how far the callback is, if there is one."""
        if self.callback is None:
            return self.shown()
        last = self.calls[-1].outcome if self.calls else None
        return {**self.shown(), "callback": {"status": self.callback, "calls": len(self.calls), "last": last}}


_heads = msgspec.msgpack.Decoder(TaskHead)
_results = msgspec.msgpack.Decoder(TaskResult)
_calls = msgspec.msgpack.Decoder(Call)


def begun(head: TaskHead, body: bytes) -> bytes:
    """Return the first records of a journal."""
    return record(Kind.BEGUN, msgspec.msgpack.encode(head)) + record(Kind.BODY, body)


def started() -> bytes:
    """Return the note that a task was begun."""
    return record(Kind.STARTED)


def ended(result: TaskResult) -> bytes:
    """Return the record of a result."""
    return record(Kind.RESULT, msgspec.msgpack.encode(result))


def called(call: Call) -> bytes:
    """Return the record of a call."""
    return record(Kind.CALLED, msgspec.msgpack.encode(call))


def failure(status: int, why: str, at: float) -> TaskResult:
    """Return the result of a task that nobody has answered."""
    return TaskResult(status, msgspec.json.encode({"error": {"message": why, "code": status}}), int(at))


def head_in(records: Sequence[Record]) -> TaskHead:
    """Return the head of a task. Raises DecodeError."""
    if not records or records[0].kind is not Kind.BEGUN:
        raise DecodeError("the journal of a task does not begin with its request")
    return _decoded(_heads, records[0].content)  # type: ignore[no-any-return]


def task_in(records: Sequence[Record]) -> Task:
    """Return what the records of a journal tell. Raises DecodeError."""
    head, content = head_in(records), dict[Kind, bytes]()
    for one in records:
        content.setdefault(one.kind, one.content)
    if Kind.BODY not in content:
        raise DecodeError("the journal of a task has no request")
    result = content.get(Kind.RESULT)
    return Task(
        head,
        content[Kind.BODY],
        Kind.STARTED in content,
        None if result is None else _decoded(_results, result),
        tuple(_decoded(_calls, one.content) for one in records if one.kind is Kind.CALLED),
    )


def undefined(task: str) -> dict[str, Any]:
    """Return a task of which nothing can be read as clients see it."""
    why = "what was kept of the task cannot be read"
    return {"task_id": task, "status": "UNDEFINED", "result": None, "traceback": why, "status_code": None}


def _decoded(decoder: Any, content: bytes) -> Any:
    try:
        return decoder.decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DecodeError(f"the journal of a task has a record that cannot be read: {error}") from error


def _json(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return body.decode(errors="replace")


def _message(body: bytes) -> str:
    found = _json(body)
    error = found.get("error") if isinstance(found, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else body.decode(errors="replace")[:_SHOWN]


# Settings of asynchronous tasks.


@dataclass(frozen=True)
class TaskLimits:
    """Bounds on asynchronous tasks, and on how long their results are kept."""

    task_retention_s: float = field(
        default=86400.0, metadata={"help": "How long the result of an asynchronous task is kept, in s."}
    )
    task_patience_s: float = field(
        default=86400.0,
        metadata={
            "help": "How long an asynchronous task is tried again while its model has no room or no worker, in s. "
            "After that it fails."
        },
    )
    max_tasks: int = field(
        default=10_000,
        metadata={
            "help": "Maximum number of asynchronous tasks of each key, those with a result included. More get status "
            "507."
        },
    )
    max_task_bytes: int = field(
        default=1024 * 1024 * 1024,
        metadata={
            "help": "Size of the tasks kept for a key, with their results, in bytes. Beyond it no more are taken, and "
            "results fail."
        },
    )
    max_task_requests: int = field(
        default=256,
        metadata={
            "help": "Maximum number of asynchronous tasks in flight for each model in a frontend, if the model's ready "
            "workers run so many at once."
        },
    )
