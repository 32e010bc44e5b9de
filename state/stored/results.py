"""The results of a batch: two files, to which whole lines are appended. A line counts when it is on the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dynamo_local.core.errors import StateError
from dynamo_local.core.stored.batches import BatchUsage
from dynamo_local.core.stored.lines import Recorded, recorded_in
from state.files import DISK, FILE_MODE, Disk, system_errors

_BEGIN = b'{"id":'


class ResultFile:
    """A file to which results are appended. A part of one that a crash has left is cut off when it is opened."""

    def __init__(self, path: Path, disk: Disk = DISK) -> None:
        self.path = path
        self._disk = disk
        self._descriptor: int | None = None
        self._size = 0

    def open(self) -> list[Recorded]:
        """Return the results that there are. Raises DiskError, and StateError if the file holds anything else."""
        done: list[Recorded] = []
        with system_errors(f"cannot open {self.path}"):
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, FILE_MODE)
            with self.path.open("rb") as file:
                for line in file:
                    if (recorded := recorded_in(line)) is None:
                        if line.endswith(b"\n") or not line.startswith(_BEGIN[: len(line)]):
                            raise StateError(f"{self.path} holds something else than results of a batch")
                        break
                    done.append(recorded)
                    self._size += len(line)
            os.ftruncate(self._descriptor, self._size)
        return done

    def append(self, lines: Sequence[bytes]) -> None:
        """Append lines, and have them on the disk. Raises DiskError; then none of them is there."""
        if not lines:
            return
        assert self._descriptor is not None, "opened before"
        data = b"".join(lines)
        with system_errors(f"cannot write {self.path}"):
            try:
                if self._disk.write(self._descriptor, data) < len(data):
                    # A disk that has become full takes a part.
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._disk.sync(self._descriptor)
            except OSError:
                os.ftruncate(self._descriptor, self._size)
                raise
        self._size += len(data)

    def close(self) -> None:
        """Close the file."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)


class Results:
    """The results of one batch, for the one process that runs it."""

    def __init__(self, folder: Path, disk: Disk = DISK) -> None:
        self._folder = folder
        self._disk = disk
        self._output = ResultFile(folder / "output.jsonl", disk)
        self._errors = ResultFile(folder / "errors.jsonl", disk)
        self.done: set[str] = set()
        """Custom ids of the lines that have a result."""
        self.completed = self.failed = 0
        self.usage = BatchUsage()
        """Of the lines that were answered."""

    @property
    def output(self) -> Path:
        """File with the results of lines that were answered."""
        return self._output.path

    @property
    def errors(self) -> Path:
        """File with the results of lines that have failed."""
        return self._errors.path

    def open(self) -> None:
        """Read what is there. Raises DiskError."""
        completed, failed = self._output.open(), self._errors.open()
        self.completed, self.failed = len(completed), len(failed)
        self.done = {each.custom_id for each in (*completed, *failed)}
        self.usage = sum((each.usage for each in completed), BatchUsage())
        with system_errors(f"cannot write to {self._folder}"):
            self._disk.sync_directory(self._folder)

    def add(self, answered: Sequence[tuple[str, bytes]], failed: Sequence[tuple[str, bytes]]) -> None:
        """Record results: custom id, and line. They count when this returns. Raises DiskError; those of a file that was
        written do count then, which `done` tells."""
        self._output.append([line for _, line in answered])
        self.completed += len(answered)
        recorded = (recorded_in(line) for _, line in answered)
        self.usage = sum((each.usage for each in recorded if each is not None), self.usage)
        self.done.update(custom_id for custom_id, _ in answered)
        self._errors.append([line for _, line in failed])
        self.failed += len(failed)
        self.done.update(custom_id for custom_id, _ in failed)

    def close(self) -> None:
        """Close both files."""
        self._output.close()
        self._errors.close()
