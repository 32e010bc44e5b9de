"""Asynchronous tasks as text. Pure, apart from the local time zone and the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo_local.cli.output.console import date, facts, table
from dynamo_local.core.async_tasks.callbacks import target_of
from dynamo_local.core.async_tasks.records import Task
from dynamo_local.core.errors import DecodeError, ItemAbsentError
from dynamo_local.core.keys.values import name_in
from state.async_tasks.store import TaskStore

_HEADERS = ("TASK", "STATUS", "MODEL", "PATH", "OWNER", "CREATED")


@dataclass(frozen=True)
class Listed:
    """A task with its owner. `found`: None, if what is kept of it cannot be read."""

    name: str
    owner: str
    found: Task | None

    @classmethod
    def read(cls, store: TaskStore, owner: str, task: str) -> Listed | None:
        """Read a task. None: it is not there any more."""
        try:
            return cls(task, name_in(owner) or "-", store.find(owner, task))
        except DecodeError:
            return cls(task, name_in(owner) or "-", None)
        except ItemAbsentError:
            return None

    @property
    def status(self) -> str:
        return "UNDEFINED" if self.found is None else self.found.status


def tasks_as_json(tasks: Sequence[Listed]) -> str:
    """Return tasks as indented JSON."""
    return _indented([_plain(each) for each in tasks])


def task_as_json(task: Listed) -> str:
    """Return a task as indented JSON."""
    return _indented(_plain(task))


def table_of_tasks(tasks: Sequence[Listed]) -> str:
    """Return a line for each task."""
    return table(_HEADERS, [_cells(each) for each in tasks]) if tasks else "there are no such tasks"


def description_of_task(task: Listed) -> str:
    """Return what is known of a task, a line for each fact."""
    return facts(_facts(task))


def _cells(task: Listed) -> tuple[str, ...]:
    if task.found is None:
        return task.name, task.status, "", "", task.owner, ""
    head = task.found.head
    return task.name, task.status, head.model, head.path, task.owner, date(head.created_at)


def _facts(task: Listed) -> Iterator[tuple[str, str]]:
    yield "task", task.name
    yield "status", task.status
    yield "owner", task.owner
    if task.found is None:
        return
    head, result = task.found.head, task.found.result
    yield "model", head.model
    yield "path", head.path
    yield "priority", str(head.priority)
    yield "created", date(head.created_at)
    yield "ended", "" if result is None else date(result.at)
    if task.found.callback is not None:
        calls = task.found.calls
        last = f", the last one: {calls[-1].outcome}, {date(calls[-1].at)}" if calls else ""
        yield "callback", f"{task.found.callback}: {len(calls)} calls{last}"
        yield "receiver", target_of(head.callback_url).origin
    yield "answered", "" if result is None else f"status {result.status}, {len(result.body)} bytes"


def _plain(task: Listed) -> dict[str, Any]:
    known: dict[str, Any] = {"task_id": task.name, "status": task.status, "owner": task.owner}
    if task.found is None:
        return known
    head, result = task.found.head, task.found.result
    known |= {"model": head.model, "path": head.path, "priority": head.priority, "created_at": head.created_at}
    known["ended_at"] = None if result is None else result.at
    known["callback"] = task.found.callback
    known["callback_calls"] = len(task.found.calls)
    known["status_code"] = None if result is None else result.status
    return known


def _indented(plain: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(plain), indent=2).decode()
