"""The store of asynchronous tasks."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from dynamo_local.core.async_tasks.records import (
    TASK_ID,
    Call,
    Task,
    TaskHead,
    TaskLimits,
    TaskResult,
    begun,
    called,
    ended,
    started,
    task_in,
)
from dynamo_local.core.errors import DecodeError, ItemAbsentError, StorageFullError
from state.answers.folder import JournalFolder, Kept, Look
from state.answers.journal import AnswerJournal
from state.files import DISK, Disk
from state.paths import StatePaths

VERSION = 1

_COUNTED_FOR_S, _COUNTED_FOR_RESULTS_S = 1.0, 10.0
"""Time for which the number of an owner's tasks is taken as it was counted, with those added since: for new tasks, and
for results, which may be many."""


def new_task_id(now: float) -> str:
    """Return an id that no other task has. `now`: in seconds since 1970."""
    return f"task_{int(now * 1000):012x}{secrets.token_hex(10)}"


class TakenTask:
    """A task whose lock this process holds, until `end` or `release`. All methods block, and raise DiskError."""

    def __init__(self, journal: AnswerJournal, count: Callable[[str, int], bool]) -> None:
        """`count`: counts so many bytes more of an owner, if there is room for them."""
        self.owner = journal.owner
        self._count = count
        self._journal = journal
        self._is_held = True

    def read(self) -> Task:
        """Return the task as far as it is. Raises DecodeError."""
        return task_in(self._journal.read())

    def has_room(self, size: int) -> bool:
        """Whether its owner may have so many bytes more; they are counted then."""
        return self._count(self.owner, size)

    def note_start(self) -> None:
        """Note that the task is begun. A power cut may lose that, which changes nothing."""
        self._journal.write(started(), durable=False)

    def record(self, result: TaskResult) -> None:
        """Record the result. It is on the disk when this returns."""
        self._journal.write(ended(result))

    def note_call(self, call: Call) -> None:
        """Record a call of the receiver."""
        self._journal.write(called(call))

    def end(self) -> None:
        """Note that nothing follows, and let go of the task."""
        self._journal.end()
        self._is_held = False

    def release(self) -> None:
        """Let others take the task, if it has not ended."""
        if self._is_held:
            self._is_held = False
            self._journal.close()


class TaskStore:
    """The tasks of one namespace, for any number of frontends. All methods block, and raise StateError."""

    def __init__(
        self,
        paths: StatePaths,
        limits: TaskLimits | None = None,
        disk: Disk = DISK,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = JournalFolder(paths.tasks_dir, "asynchronous tasks", VERSION, disk)
        self._limits = limits or TaskLimits()
        self._clock = clock
        self._counting = threading.Lock()
        self._counted: dict[str, tuple[float, Kept]] = {}

    def check(self) -> None:
        """Check the store, if there is one. Raises StateError if a later release has written it."""
        self._folder.check()

    def create(self, owner: str, head: TaskHead, body: bytes) -> None:
        """Store a task, which any frontend may take then. Raises StorageFullError: the owner has too many."""
        data = begun(head, body)
        with self._counting:
            self._count(owner, len(data))
        self._folder.create(owner, head.task, data).close()

    def find(self, owner: str, task: str) -> Task:
        """Return a task of this owner. Raises ItemAbsentError, DecodeError."""
        reader = self._folder.reader(owner, task) if TASK_ID.fullmatch(task) else None
        if reader is None:
            raise ItemAbsentError(f"no such task: {task[:64]}")
        try:
            return task_in(reader.read())
        finally:
            reader.close()

    def all(self) -> list[tuple[str, str]]:
        """Return owner and id of all tasks."""
        return self._folder.all()

    def look(self) -> Look:
        """Return the tasks that have not ended, the oldest of each owner first, and those that are to be."""
        return self._folder.look()

    def take(self, owner: str, task: str) -> TakenTask | None:
        """Take a task that has not ended. None: somebody else has it, or it has ended."""
        journal = self._folder.take(owner, task)
        return None if journal is None else TakenTask(journal, self._count_result)

    def has_ended(self, owner: str, task: str) -> bool:
        """Whether nothing of the task follows."""
        return not self._folder.is_running(owner, task)

    def cancel(self, owner: str, task: str) -> None:
        """Have whoever has the task end it. Does nothing to one that has ended. Raises ItemAbsentError."""
        if TASK_ID.fullmatch(task) and self._folder.is_running(owner, task):
            self._folder.ask_to_cancel(owner, task)
            return
        # One that is there and cannot be read has ended.
        with suppress(DecodeError):
            self.find(owner, task)

    def remove(self, owner: str, task: str) -> None:
        """Remove a task that has ended. Raises ItemAbsentError."""
        if not self._folder.remove(owner, task):
            raise ItemAbsentError(f"no such task: {task[:64]}")
        with self._counting:
            self._counted.pop(owner, None)

    def remove_expired(self, now: float) -> int:
        """Remove tasks that ended long ago. Returns how many. `now`: in seconds since 1970."""
        return self._folder.remove_expired(now, self._limits.task_retention_s)

    def owner_of(self, task: str) -> str:
        """Return whose task it is. Raises ItemAbsentError."""
        for owner, name in self.all():
            if name == task:
                return owner
        raise ItemAbsentError(f"no such task: {task[:64]}")

    def _count(self, owner: str, size: int) -> None:
        """Count one more task. Raises StorageFullError."""
        counted_at, kept = self._kept(owner, _COUNTED_FOR_S)
        limits = self._limits
        if kept.answers >= limits.max_tasks:
            why = f"{kept.answers} tasks are kept for this key already (setting max-tasks)"
        elif kept.size >= limits.max_task_bytes:
            why = f"tasks of {kept.size} bytes are kept for this key already (setting max-task-bytes)"
        else:
            self._counted[owner] = counted_at, Kept(kept.answers + 1, kept.size + size)
            return
        raise StorageFullError(why, "delete some, or wait until they expire")

    def _count_result(self, owner: str, size: int) -> bool:
        """Count the bytes of a result. False: there is no room for them."""
        with self._counting:
            counted_at, kept = self._kept(owner, _COUNTED_FOR_RESULTS_S)
            if kept.size + size > self._limits.max_task_bytes:
                return False
            self._counted[owner] = counted_at, Kept(kept.answers, kept.size + size)
        return True

    def _kept(self, owner: str, for_s: float) -> tuple[float, Kept]:
        """Return what the owner has, and when it was counted: not longer ago than `for_s`."""
        found = self._counted.get(owner)
        if found is None or self._clock() - found[0] > for_s:
            found = self._counted[owner] = self._clock(), self._folder.kept(owner)
        return found
