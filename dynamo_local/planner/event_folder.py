"""TensorBoard's event files on disk: a new one when one has grown large, and the oldest removed beyond a bound."""

from __future__ import annotations

import logging
import re
import time
from contextlib import suppress
from pathlib import Path

from dynamo_local.core.errors import ConfigError

try:
    from tensorboard.compat.proto import event_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
except ImportError as error:
    raise ConfigError(
        "event files need the package tensorboard, which is not installed", "install dynamo-local[cpu] or [cuda]"
    ) from error

_log = logging.getLogger(__name__)

FLUSH_S = 2.0
_PENDING = 1000
"""Events that wait for the disk."""

_FILES = 8
"""Files that the bound is shared out to."""

_RECORD_BYTES = 16
"""Length and checksums around each event."""

_EVENT_FILES = "events.out.tfevents.*"
_RUN = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")
RUN_FORMAT = "%Y-%m-%d_%H-%M-%S"
"""Names of run folders. Nothing in other folders is ever removed."""


class EventFolder:
    """The files of one run, `run` in `log_dir`. `max_bytes` bounds those of all runs there together.

    TensorBoard reads the files of a folder one after another, by name. Names begin with the second, so there is at
    most one a second. Everything here raises OSError where the disk does.
    """

    def __init__(self, log_dir: Path, run: str, max_bytes: int) -> None:
        self.path = log_dir / run
        self._log_dir = log_dir
        self._max_bytes = max_bytes
        self._file_bytes = max_bytes // _FILES
        self._writer = self._open()

    def add(self, event: event_pb2.Event) -> None:
        """Append an event. A thread of the writer's own waits for the disk."""
        if self._written >= self._file_bytes and int(time.time()) != self._opened_s:
            self._writer.close()
            self._writer = self._open()
        self._written += event.ByteSize() + _RECORD_BYTES
        self._writer.add_event(event)

    def close(self) -> None:
        """Write out what is left."""
        self._writer.close()

    def _open(self) -> EventFileWriter:
        remove_oldest(self._log_dir, self._max_bytes - self._file_bytes)
        self._written, self._opened_s = 0, int(time.time())
        return EventFileWriter(str(self.path), _PENDING, FLUSH_S)


def remove_oldest(log_dir: Path, max_bytes: int) -> None:
    """Remove the oldest event files of all runs, until the others have no more than so many bytes.

    By their times of modification: what a living planner writes is young. A file that cannot be removed is left."""
    files = []
    for path in log_dir.glob(f"*/{_EVENT_FILES}"):
        with suppress(FileNotFoundError):
            status = path.stat()
            files.append((status.st_mtime, status.st_size, path))
    own = sorted(file for file in files if _RUN.fullmatch(file[2].parent.name))
    excess = sum(size for _, size, _ in own) - max_bytes
    for _, size, path in own:
        if excess <= 0:
            return
        _remove(path)
        excess -= size


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
        # Not empty while it has younger files.
        with suppress(OSError):
            path.parent.rmdir()
    except OSError as error:
        _log.warning("an old event file stays: %s", error)
