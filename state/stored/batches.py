"""The store of batches: what is ordered, and what has become of each line.

    {folder}/batch_<24 digits>/order.json      core.stored.batches.BatchOrder; never changes
    {folder}/batch_<24 digits>/input.jsonl     the content of the input file, which may be deleted meanwhile
    {folder}/batch_<24 digits>/state.json      core.stored.batches.BatchState, written by the runner
    {folder}/batch_<24 digits>/cancelled       when the batch was cancelled, in seconds since 1970
    {folder}/batch_<24 digits>/runner.lock     held by the process that runs the batch
    {folder}/batch_<24 digits>/output.jsonl    results, appended
    {folder}/batch_<24 digits>/errors.jsonl    the same, of lines that have failed

A line whose result is in one of the last two files is done. They become the batch's output files as they are.
Calls block.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from dynamo_local.core.errors import ItemAbsentError, StateError, StorageFullError
from dynamo_local.core.stored.batches import BATCH_ID, KEPT_S, Batch, BatchLimits, BatchOrder, BatchState
from dynamo_local.core.stored.files import StoredFile
from state.files import replace_file, system_errors
from state.locks import FileLock, LockTimeoutError
from state.paths import StatePaths
from state.stored.files import FileStore
from state.stored.folder import StoreFolder
from state.stored.results import Results

BATCHES_VERSION = 1

_ORDER, _STATE, _INPUT, _CANCELLED = "order.json", "state.json", "input.jsonl", "cancelled"


def new_batch_id() -> str:
    """Return an id that no other batch has."""
    return f"batch_{secrets.token_hex(12)}"


class BatchFolder:
    """A batch for the one process that runs it, until `release`."""

    def __init__(self, path: Path, order: BatchOrder, lock: FileLock) -> None:
        self.order = order
        self.input = path / _INPUT
        self.results = Results(path)
        self._path = path
        self._lock = lock

    def batch(self) -> Batch:
        """Read how far the batch is. Raises StateError."""
        return Batch(self.order, _read_state(self._path), _cancelled_at(self._path))

    def write(self, state: BatchState) -> None:
        """Replace the state. Raises DiskError."""
        replace_file(self._path / _STATE, msgspec.json.encode(state))

    def clear(self) -> None:
        """Remove what an ended batch needs no more: its input, and the results, which are files by now. Raises
        DiskError."""
        self.results.close()
        with system_errors(f"cannot clear {self._path}"):
            for path in (self.input, self.results.output, self.results.errors):
                path.unlink(missing_ok=True)

    def release(self) -> None:
        """Let somebody else run the batch. Raises DiskError."""
        self.results.close()
        self._lock.release(remove=True)


class BatchStore:
    """The batches of one namespace. Several processes may have one."""

    def __init__(self, paths: StatePaths, files: FileStore, limits: BatchLimits | None = None) -> None:
        self._folder = StoreFolder(paths.batches_dir, "batches", BATCHES_VERSION)
        self._files = files
        self._limits = limits or BatchLimits()
        self._ended: set[str] = set()
        """Batches that have ended, of which nothing changes any more."""

    def create(self, order: BatchOrder, file: StoredFile) -> Batch:
        """Store a batch of this input file. Raises StorageFullError, ItemAbsentError, StateError."""
        part = self._folder.begin()
        try:
            self._files.lend(file, part.path / _INPUT)
            replace_file(part.path / _STATE, msgspec.json.encode(BatchState()))
            replace_file(part.path / _ORDER, msgspec.json.encode(order))
            with self._folder.locked():
                self._check_room(order.owner)
                self._folder.keep(part, order.id)
        except BaseException:
            self._folder.drop(part)
            raise
        part.end()
        return Batch(order, BatchState())

    def _check_room(self, owner: str) -> None:
        under_way = sum(not batch.state.has_ended for batch in self.listed(owner))
        if under_way >= self._limits.max_batches:
            raise StorageFullError(
                f"{under_way} batches are under way, at most {self._limits.max_batches} (setting max-batches)",
                "wait for one to end, or cancel one",
            )

    def find(self, owner: str | None, batch_id: str) -> Batch:
        """Return a batch of this owner; None: of any. Raises ItemAbsentError, StateError."""
        batch = self._read(batch_id)
        if batch is None or owner not in (None, batch.order.owner):
            raise ItemAbsentError(f"no such batch: {batch_id[:64]}")
        return batch

    def listed(self, owner: str | None = None) -> list[Batch]:
        """Return the batches of this owner, the newest first; None: of all. Raises StateError."""
        found = [batch for batch in self._all() if owner in (None, batch.order.owner)]
        return sorted(found, key=lambda batch: (batch.order.created_at, batch.order.id), reverse=True)

    def cancel(self, owner: str | None, batch_id: str, now: float) -> Batch:
        """Have a batch cancelled by whoever runs it. Does nothing to one that has ended. Raises as `find`."""
        batch = self.find(owner, batch_id)
        path = self._folder.path / batch_id
        if not batch.state.has_ended and batch.cancelling_at is None:
            replace_file(path / _CANCELLED, str(int(now)).encode())
        return self.find(owner, batch_id)

    def under_way(self) -> list[str]:
        """Return the ids of the batches that have not ended, the oldest first. Raises StateError."""
        found: list[BatchOrder] = []
        for name in set(self._folder.items()) - self._ended:
            with suppress(StateError):
                batch = self._read(name)
                if batch is None or batch.state.has_ended:
                    self._ended.add(name)
                else:
                    found.append(batch.order)
        return [order.id for order in sorted(found, key=lambda order: (order.created_at, order.id))]

    def take(self, batch_id: str) -> BatchFolder | None:
        """Take a batch to run it. None: somebody else has it, or it is gone. Raises StateError."""
        path = self._folder.path / batch_id
        if not path.is_dir():
            return None
        lock = FileLock(path / "runner.lock")
        try:
            lock.acquire(0.0)
        except LockTimeoutError:
            return None
        batch = self._read(batch_id)
        if batch is None:
            lock.release(remove=True)
            return None
        return BatchFolder(path, batch.order, lock)

    def sweep(self, now: float) -> int:
        """Remove batches that ended long ago, and remains of those that were never whole. Returns their number. Raises
        StateError."""
        removed = self._folder.sweep()
        for batch in self._all():
            ended = batch.state.ended_at()
            if ended is not None and now >= ended + KEPT_S:
                removed += self._folder.remove(batch.order.id)
        return removed

    def _all(self) -> Iterator[Batch]:
        for name in self._folder.items():
            # One that is damaged must not block others.
            with suppress(StateError):
                if (batch := self._read(name)) is not None:
                    yield batch

    def _read(self, batch_id: str) -> Batch | None:
        if BATCH_ID.fullmatch(batch_id) is None:
            return None
        path = self._folder.path / batch_id
        with system_errors(f"cannot read {path}"):
            try:
                order = msgspec.json.decode((path / _ORDER).read_bytes(), type=BatchOrder)
            except FileNotFoundError:
                return None
            except (msgspec.MsgspecError, UnicodeError) as error:
                raise StateError(f"{path / _ORDER} is damaged: {error}", "delete its folder") from error
        return Batch(order, _read_state(path), _cancelled_at(path))


def _read_state(path: Path) -> BatchState:
    with system_errors(f"cannot read {path / _STATE}"):
        try:
            return msgspec.json.decode((path / _STATE).read_bytes(), type=BatchState)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise StateError(f"{path / _STATE} is damaged: {error}", "delete its folder") from error


def _cancelled_at(path: Path) -> int | None:
    try:
        return int((path / _CANCELLED).read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):
        return None
