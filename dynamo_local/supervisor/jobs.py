"""Tells of the jobs of a namespace, which are asynchronous tasks and batches, and cancels them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from dynamo_local.control.operations import CANCEL_JOB, GET_JOB, LIST_JOBS, Call, Handlers, Operation
from dynamo_local.core.async_tasks.callbacks import target_of
from dynamo_local.core.async_tasks.records import Task
from dynamo_local.core.errors import DecodeError, ItemAbsentError, OrderError
from dynamo_local.core.keys.values import name_in
from dynamo_local.core.stored.batches import Batch
from state.async_tasks.store import TaskStore
from state.paths import StatePaths
from state.stored.batches import BatchStore
from state.stored.files import FileStore


class Jobs:
    """The jobs of all owners in one namespace, whether its server runs or not. What was asked and answered is their
    owners', and not told."""

    def __init__(self, paths: StatePaths, wall_clock: Callable[[], float] = time.time) -> None:
        self._paths = paths
        self._wall_clock = wall_clock

    @property
    def handlers(self) -> Handlers:
        return {each: partial(self._carry_out, each) for each in (LIST_JOBS, GET_JOB, CANCEL_JOB)}

    async def _carry_out(self, operation: Operation, call: Call) -> dict[str, Any]:
        return await asyncio.to_thread(self.do, operation, call)

    def do(self, operation: Operation, call: Call) -> dict[str, Any]:
        """Carry out one of these operations. Blocks; several threads may call it. Raises OrderError, ItemAbsentError,
        StateError."""
        if operation == LIST_JOBS:
            return {"object": "list", "data": list(self._listed(call))}
        name, cancels = call.names["job"], operation == CANCEL_JOB
        if name.startswith("batch_"):
            batches = self._batches()
            return _batch(batches.cancel(None, name, self._wall_clock()) if cancels else batches.find(None, name))
        if not name.startswith("task_"):
            raise ItemAbsentError(f"no such job: {name[:64]}")
        tasks = TaskStore(self._paths)
        owner = tasks.owner_of(name)
        if cancels:
            tasks.cancel(owner, name)
        return _task(tasks, owner, name)

    def _listed(self, call: Call) -> Iterator[dict[str, Any]]:
        kind, with_ended = call.query.get("kind"), call.flag("ended")
        if kind not in (None, "task", "batch"):
            raise OrderError("kind must be task or batch", param="kind")
        if kind != "batch":
            yield from self._listed_tasks(with_ended)
        if kind != "task":
            yield from (_batch(each) for each in self._batches().listed() if with_ended or not each.state.has_ended)

    def _listed_tasks(self, with_ended: bool) -> Iterator[dict[str, Any]]:
        # A store of its own for each question, because looking is for one thread at a time.
        tasks = TaskStore(self._paths)
        found = tasks.all() if with_ended else tasks.look().running
        for owner, name in sorted(found, key=lambda each: each[1], reverse=True):
            # It may be removed meanwhile.
            with suppress(ItemAbsentError):
                yield _task(tasks, owner, name)

    def _batches(self) -> BatchStore:
        return BatchStore(self._paths, FileStore(self._paths))


def _batch(batch: Batch) -> dict[str, Any]:
    """Return a batch as its clients see it, with its owner."""
    return msgspec.to_builtins({**batch.shown(), "owner": _owner(batch.order.owner)})  # type: ignore[no-any-return]


def _task(store: TaskStore, owner: str, name: str) -> dict[str, Any]:
    """Return what is told of a task; of one that cannot be read, no more than that. Raises ItemAbsentError."""
    known: dict[str, Any] = {"task_id": name, "status": "UNDEFINED", "owner": _owner(owner)}
    with suppress(DecodeError):
        known |= _read_facts(store.find(owner, name))
    return {**known, "has_ended": store.has_ended(owner, name)}


def _read_facts(task: Task) -> dict[str, Any]:
    head, result, calls = task.head, task.result, task.calls
    return {
        "status": task.status,
        "model": head.model,
        "path": head.path,
        "priority": head.priority,
        "created_at": head.created_at,
        "ended_at": None if result is None else result.at,
        "callback": task.callback,
        "callback_calls": len(calls),
        "status_code": None if result is None else result.status,
        "callback_receiver": None if task.callback is None else target_of(head.callback_url).origin,
        "callback_last": {"outcome": calls[-1].outcome, "at": calls[-1].at} if calls else None,
        "answer_bytes": None if result is None else len(result.body),
    }


def _owner(owner: str) -> str:
    """The name of the key; a dash without keys."""
    return name_in(owner) or "-"
