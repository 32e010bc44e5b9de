"""A recorder (core/planning/decision.py) that writes event files for TensorBoard.

TensorBoard's own writer is used, which needs neither torch nor TensorFlow.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from dynamo_local.core.errors import ConfigError
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.planning.actions import ActionOutcome
from dynamo_local.core.planning.decision import Decision
from dynamo_local.core.planning.endpoints.decision import EndpointDecision, EndpointsObservation, OrderOutcome
from dynamo_local.core.planning.window import Observation
from dynamo_local.planner.series import (
    of_decision,
    of_endpoints,
    of_observation,
    of_observation_as_dynamo,
    text_of,
    text_of_endpoint,
)

try:
    from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
    from tensorboard.plugins.text.metadata import create_summary_metadata
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
except ImportError as error:
    raise ConfigError(
        "event files need the package tensorboard, which is not installed", "install dynamo-local[cpu] or [cuda]"
    ) from error

_log = logging.getLogger(__name__)

ALL_DECISIONS = "decisions/all"
ACTING_DECISIONS = "decisions/with_actions"
"""Tag of the decisions with actions. Apart, because TensorBoard shows only a sample of the texts of a tag."""

CHANGES = "decisions/of_server"
"""Tag of what the server has done to endpoints by itself."""

MAX_BYTES = 64 * 1024 * 1024


class TensorBoardRecorder:
    """Writes to a new folder in `log_dir`, so that each life of a planner is one run in TensorBoard.

    `max_bytes` bounds the event files of all runs together: the oldest are removed. Steps are seconds since the
    planner's first pull. A disk error ends the recording, not the planner. `dynamo_tags`: numbers of pulls are also
    written under the names of Dynamo's planner.
    """

    def __init__(
        self,
        log_dir: Path,
        *,
        max_bytes: int = MAX_BYTES,
        dynamo_tags: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises ConfigError if the folder cannot be written to."""
        self._dynamo_tags = dynamo_tags
        self._clock = clock
        self._wall_clock = wall_clock
        self._first_at: float | None = None
        self._curves = Thinned()
        self._endpoint_curves = Thinned()
        run = f"{datetime.fromtimestamp(wall_clock(), UTC):{RUN_FORMAT}}"
        self.folder = log_dir / run
        try:
            self._files: EventFolder | None = EventFolder(log_dir, run, max_bytes)
        except OSError as error:
            raise ConfigError(f"cannot write event files to {self.folder}: {error.strerror}") from error

    def observed(self, observation: Observation) -> None:
        """Write the numbers of a pull that have changed."""
        numbers = of_observation(observation)
        if self._dynamo_tags:
            numbers |= of_observation_as_dynamo(observation)
        self._write_curves(self._curves.take(observation.at, numbers))

    def decided(self, decision: Decision, outcomes: Sequence[ActionOutcome]) -> None:
        """Write a decision: its numbers as curves, all of it as text."""
        text = text_of(decision, outcomes)
        tags = (ALL_DECISIONS, ACTING_DECISIONS) if decision.actions else (ALL_DECISIONS,)
        self._write(decision.at, [*_scalars(of_decision(decision)), *(_text(tag, text) for tag in tags)])

    def endpoints_observed(self, observation: EndpointsObservation, decisions: Sequence[EndpointDecision]) -> None:
        """Write the numbers of a pull that have changed."""
        self._write_curves(self._endpoint_curves.take(observation.at, of_endpoints(observation, decisions)))

    def endpoint_decided(self, decision: EndpointDecision, outcome: OrderOutcome | None) -> None:
        """Write a decision as text."""
        text = text_of_endpoint(decision, outcome)
        tags = (ALL_DECISIONS, ACTING_DECISIONS) if decision.order is not None else (ALL_DECISIONS,)
        self._write(decision.at, [_text(tag, text) for tag in tags])

    def endpoint_changed(self, event: Event) -> None:
        """Write what the server has done as text. The numbers come with the next pull."""
        why = f": {event.why}" if event.why else ""
        self._write(self._clock(), [_text(CHANGES, f"**{event.endpoint}** {event.what}{why}")])

    def close(self) -> None:
        """Write out what is left."""
        self._write_curves(self._curves.finish())
        self._write_curves(self._endpoint_curves.finish())
        if self._files is not None:
            self._guarded(self._files.close)
            self._files = None

    def _write_curves(self, points: Iterable[tuple[float, Mapping[str, float]]]) -> None:
        for at, numbers in points:
            self._write(at, _scalars(numbers))

    def _write(self, at: float, values: Iterable[summary_pb2.Summary.Value]) -> None:
        if self._files is None:
            return
        if self._first_at is None:
            self._first_at = at
        event = event_pb2.Event(
            wall_time=self._wall_clock() - (self._clock() - at),
            step=max(0, int(at - self._first_at)),
            summary=summary_pb2.Summary(value=values),
        )
        files = self._files
        self._guarded(lambda: files.add(event))

    def _guarded(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            _log.warning("event files are not written any more: %s", error)
            self._files = None


def _scalars(numbers: Mapping[str, float]) -> list[summary_pb2.Summary.Value]:
    return [summary_pb2.Summary.Value(tag=tag, simple_value=number) for tag, number in numbers.items()]


def _text(tag: str, text: str) -> summary_pb2.Summary.Value:
    one = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)])
    tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[text.encode()], tensor_shape=one)
    metadata = create_summary_metadata(display_name="", description="")
    metadata.data_class = summary_pb2.DATA_CLASS_TENSOR
    return summary_pb2.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)


# Drops redundant points of curves: of a stretch with a constant value, its two ends are kept. Pure.

KEPT_EVERY_S = 60.0
"""Period after which a constant value is written again, in seconds, so that live curves reach the present."""


@dataclass
class _Curve:
    """The last value of a curve. `kept_at`: time of its last kept point. `seen_at`: time of its last point."""

    value: float
    kept_at: float
    seen_at: float


class Thinned:
    """The curves of one recording. Straight lines between the kept points reproduce the dropped ones."""

    def __init__(self, kept_every_s: float = KEPT_EVERY_S) -> None:
        self._kept_every_s = kept_every_s
        self._curves: dict[str, _Curve] = {}

    def take(self, at: float, numbers: Mapping[str, float]) -> list[tuple[float, dict[str, float]]]:
        """Add the numbers of time `at`; return the points to keep, as (time, numbers), in order of time.

        A curve without a number ends. Times never decrease from call to call.
        """
        ends = {name: curve for name, curve in self._curves.items() if numbers.get(name) != curve.value}
        points = self._ends(ends)
        for name in ends.keys() - numbers.keys():
            del self._curves[name]
        if kept := {name: number for name, number in numbers.items() if self._keeps(name, number, at)}:
            points.append((at, kept))
        return points

    def finish(self) -> list[tuple[float, dict[str, float]]]:
        """End all curves; return the points that are still to be kept."""
        points = self._ends(self._curves)
        self._curves = {}
        return points

    def _ends(self, curves: Mapping[str, _Curve]) -> list[tuple[float, dict[str, float]]]:
        points: dict[float, dict[str, float]] = {}
        for name, curve in curves.items():
            if curve.seen_at > curve.kept_at:
                points.setdefault(curve.seen_at, {})[name] = curve.value
        return sorted(points.items())

    def _keeps(self, name: str, number: float, at: float) -> bool:
        curve = self._curves.get(name)
        if curve is not None and curve.value == number and at - curve.kept_at < self._kept_every_s:
            curve.seen_at = at
            return False
        self._curves[name] = _Curve(number, at, at)
        return True


# Event files for TensorBoard on disk: large ones are continued in new files, and the oldest are removed.

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
