"""Event files for TensorBoard on disk: large ones are continued in new files, and the oldest are removed."""

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
"""Maximum number of events that wait to be written."""

_FILES = 8
"""Number of files among which the bound is divided."""

_RECORD_BYTES = 16
"""Size of the length and the checksums around each event."""

_EVENT_FILES = "events.out.tfevents.*"
_RUN = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")
RUN_FORMAT = "%Y-%m-%d_%H-%M-%S"
"""Names of run folders. Files in other folders are never removed."""


class EventFolder:
    """The event files of one run, in folder `run` of `log_dir`. `max_bytes` bounds the files of all runs together.

    TensorBoard reads the files of a folder in the order of their names, which begin with the time in seconds. Therefore
    at most one file is made a second. Methods raise OSError if the disk does.
    """

    def __init__(self, log_dir: Path, run: str, max_bytes: int) -> None:
        self.path = log_dir / run
        self._log_dir = log_dir
        self._max_bytes = max_bytes
        self._file_bytes = max_bytes // _FILES
        self._writer = self._open()

    def add(self, event: event_pb2.Event) -> None:
        """Append an event. The writer's thread waits for the disk."""
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
    """Remove the oldest event files of all runs until the rest has at most `max_bytes`.

    Age is the time of modification, so files of running planners are the youngest. A file that cannot be removed stays.
    """
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
        # The folder is not empty while it has younger files.
        with suppress(OSError):
            path.parent.rmdir()
    except OSError as error:
        _log.warning("an old event file cannot be removed: %s", error)
