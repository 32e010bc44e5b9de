"""A recorder (core/planning/decision.py) that writes event files for TensorBoard.

TensorBoard's own writer is used, which needs neither torch nor TensorFlow.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from dynamo_local.core.errors import ConfigError
from dynamo_local.core.fleet.view import PREFILL_ROLE, RoutingCounts
from dynamo_local.core.messages.presence import MigrationCounts
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.messages.work import QueueLength
from dynamo_local.core.planning.actions import ActionOutcome, Outcome
from dynamo_local.core.planning.decision import Decision, Recorder, Verdict, describe
from dynamo_local.core.planning.policies.dynamo import kv_load
from dynamo_local.core.planning.window import EndpointSeen, Fleet, Observation, WorkerSeen

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


class TensorBoardRecorder(Recorder):
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
        run = f"{datetime.fromtimestamp(wall_clock(), UTC):{RUN_FORMAT}}"
        self.folder = log_dir / run
        try:
            self._files: EventFolder | None = EventFolder(log_dir, run, max_bytes)
        except OSError as error:
            raise ConfigError(f"cannot write event files to {self.folder}: {error.strerror}") from error

    def observed(self, observation: Observation, decisions: Sequence[Decision]) -> None:
        """Write the numbers of a pull that have changed."""
        numbers = of_observation(observation, decisions)
        if self._dynamo_tags and observation.main is not None:
            numbers |= of_observation_as_dynamo(observation.main.fleet)
        self._write_curves(self._curves.take(observation.at, numbers))

    def decided(self, decision: Decision, outcomes: Sequence[Outcome]) -> None:
        """Write a decision: all of it as text, and about actions its numbers as curves. Other numbers are of pulls."""
        text = text_of(decision, outcomes)
        tags = (ALL_DECISIONS, ACTING_DECISIONS) if decision.changes else (ALL_DECISIONS,)
        numbers = of_decision(decision) if decision.by_actions else {}
        self._write(decision.at, [*_scalars(numbers), *(_text(tag, text) for tag in tags)])

    def changed(self, event: Event) -> None:
        """Write what the server has done as text. The numbers come with the next pull."""
        why = f": {event.why}" if event.why else ""
        self._write(self._clock(), [_text(CHANGES, f"**{event.endpoint}** {event.what}{why}")])

    def close(self) -> None:
        """Write out what is left."""
        self._write_curves(self._curves.finish())
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


# Observations and decisions as named numbers and text. Pure. Names are `group/name`: TensorBoard shows the curves of a
# group together. What is unknown has no number.

STANDINGS = ("routable", "starting", "parked", "retiring")


def of_observation(observation: Observation, decisions: Sequence[Decision]) -> dict[str, float]:
    """Return the numbers of a pull, and of the decisions about numbers that were made at it, by name."""
    found: dict[str, float] = {}
    if observation.main is not None:
        found |= _of_fleet(observation.main.fleet) | _of_server(observation)
    for seen in observation.others:
        found |= _of_endpoint(seen)
    for decision in decisions:
        for verdict in decision.verdicts:
            if verdict.count is not None:
                found[_name(decision.endpoint, verdict.role, "wanted")] = verdict.wanted
                found[_name(decision.endpoint, verdict.role, "share")] = verdict.count.gets
    return found


def _of_server(observation: Observation) -> dict[str, float]:
    found: dict[str, float] = {}
    if observation.inventory is not None:
        found["devices/inventory"] = observation.inventory
    if observation.held is not None:
        found["devices/held"] = observation.held
    if observation.migrations is not None:
        found |= _migrations(observation.migrations)
    if observation.routing is not None:
        found |= _routing(observation.routing)
    if observation.recomputed_tokens is not None:
        found["routing/recomputed_tokens"] = observation.recomputed_tokens
    return found


def _of_fleet(fleet: Fleet) -> dict[str, float]:
    """The numbers of the graph's own workers."""
    found = {} if fleet.queue is None else _queue(fleet.queue, fleet.of_role(PREFILL_ROLE))
    if fleet.workers is None:
        return found
    for role in sorted({*fleet.templates, *(worker.role for worker in fleet.workers)}):
        found |= _role(role, fleet.of_role(role))
    for worker in fleet.workers:
        found |= _loads(worker)
    return found


def of_observation_as_dynamo(fleet: Fleet) -> dict[str, float]:
    """Return the numbers of a pull by the names of NVIDIA Dynamo's planner.

    Source: https://github.com/ai-dynamo/dynamo, examples/llm/components/planner.py. Its documentation calls
    `total_queued_requests` by another name, num_queued_request.
    """
    found: dict[str, float] = {}
    if fleet.queue is not None:
        found["prefill_queue_size"] = fleet.queue.waiting
    if fleet.workers is None:
        return found
    routable = [worker for worker in fleet.workers if worker.standing == "routable"]
    prefill = sum(worker.role == PREFILL_ROLE for worker in routable)
    found["num_prefill_workers"], found["num_decode_workers"] = prefill, len(routable) - prefill
    found["num_gpu"] = sum(worker.devices for worker in routable)
    loads = [worker.reading for worker in routable if worker.role != PREFILL_ROLE and worker.reading is not None]
    if loads:
        found["average_kv_load"] = sum(kv_load(load.kv_usage, load.waiting) for load in loads) / len(loads)
        found["total_queued_requests"] = sum(load.waiting for load in loads)
    return found


def of_decision(decision: Decision) -> dict[str, float]:
    """Return the figures that a decision was made from, and each role's wanted change (1, 0 or -1), by name."""
    found: dict[str, float] = {"devices/budget": decision.max_devices}
    for verdict in decision.verdicts:
        found[f"decision/{verdict.role}_wanted"] = verdict.wanted
        for name, figure in verdict.figures.items():
            if figure is not None:
                found[f"decision/{verdict.role}_{name.replace(' ', '_')}"] = figure
    return found


def text_of(decision: Decision, outcomes: Sequence[Outcome]) -> str:
    """Return a decision in Markdown: its changes, what became of them, and the reasons with all figures."""
    devices = "unknown" if decision.devices is None else f"{decision.devices:g}"
    lines = [f"**{decision.change}** (policy {decision.policy}, devices {devices} of {decision.max_devices})", ""]
    lines += [f"- {_became(outcome)}" for outcome in outcomes]
    lines += [line for verdict in decision.verdicts for line in _why(verdict)]
    return "\n".join(lines)


def _queue(queue: QueueLength, prefill: Sequence[WorkerSeen]) -> dict[str, float]:
    found: dict[str, float] = {"queue/waiting": queue.waiting, "queue/in_hand": queue.in_hand}
    routable = sum(worker.standing == "routable" for worker in prefill)
    if routable:
        found["queue/waiting_per_prefill_worker"] = queue.waiting / routable
    return found


def _migrations(counts: MigrationCounts) -> dict[str, float]:
    found: dict[str, float] = {f"migrations/{each.reason}_{each.outcome}": each.number for each in counts.ended}
    found["migrations/pulled_mib"] = counts.pulled_bytes / (1 << 20)
    if counts.gap_s is not None:
        found["migrations/last_gap_ms"] = counts.gap_s * 1e3
    if counts.gap_steps is not None:
        found["migrations/last_gap_steps"] = counts.gap_steps
    return found


def _routing(counts: RoutingCounts) -> dict[str, float]:
    found: dict[str, float] = {
        "routing/assigned": counts.assigned,
        "routing/unassigned": counts.unassigned,
        "routing/tokens": counts.tokens,
        "routing/predicted_cached_tokens": counts.predicted_tokens,
        "routing/pull_tokens": counts.pull_tokens,
    }
    if counts.tokens:
        found["routing/predicted_cached_share"] = counts.predicted_tokens / counts.tokens
    return found


def _role(role: str, workers: Sequence[WorkerSeen]) -> dict[str, float]:
    found: dict[str, float] = {
        f"workers/{role}_{standing}": sum(worker.standing == standing for worker in workers) for standing in STANDINGS
    }
    readings = [worker.reading for worker in workers if worker.reading is not None]
    if readings:
        found[f"kv_usage/mean_{role}"] = sum(reading.kv_usage for reading in readings) / len(readings)
        found[f"running/all_{role}"] = sum(reading.running for reading in readings)
        found[f"waiting/all_{role}"] = sum(reading.waiting for reading in readings)
    return found


def _loads(worker: WorkerSeen) -> Mapping[str, float]:
    reading = worker.reading
    if reading is None:
        return {}
    return {
        f"kv_usage/{worker.watcher}": reading.kv_usage,
        f"running/{worker.watcher}": reading.running,
        f"waiting/{worker.watcher}": reading.waiting,
    }


def _became(outcome: Outcome) -> str:
    word = "done" if outcome.done else "not done"
    note = f": {outcome.note}" if outcome.note else ""
    if isinstance(outcome, ActionOutcome):
        return f"{describe(outcome.action)}: {word} in {outcome.took_s:.1f} s{note}"
    return f"{word}{note}"


def _why(verdict: Verdict) -> Iterator[str]:
    wanted = "" if verdict.count is not None else {1: "one more: ", -1: "one less: "}.get(verdict.wanted, "as many: ")
    yield f"- {verdict.role}: {wanted}{verdict.reason}"
    for name, figure in verdict.figures.items():
        yield f"    - {name}: {'unknown' if figure is None else f'{figure:g}'}"


def _of_endpoint(seen: EndpointSeen) -> dict[str, float]:
    found: dict[str, float] = {}
    if seen.roles:
        found[f"endpoint_{seen.name}/parked"] = seen.status.parked
        found[f"endpoint_{seen.name}/asleep"] = float(seen.status.state == "asleep")
        found |= {f"endpoint_{seen.name}/{name}": number for name, number in _history(seen).items()}
        if seen.held is not None:
            found[f"endpoint_{seen.name}/held"] = seen.held
    for role in seen.roles:
        ready, demand = seen.ready(role), seen.demand(role)
        found[_name(seen.name, role, "ordered")] = seen.ordered(role)
        if ready is not None:
            found[_name(seen.name, role, "ready")] = ready
        if demand is not None:
            found[_name(seen.name, role, "in_flight")] = demand
    return found


def _history(seen: EndpointSeen) -> dict[str, float]:
    """How often it was parked and woken, and gave its devices to others, since the server started."""
    history = seen.view.history
    return {"parks": sum(history.parks.values()), "wakes": sum(history.wakes.values()), "swaps": history.swaps}


def _name(endpoint: str, role: str, number: str) -> str:
    of_role = f"{PREFILL_ROLE}_{number}" if role == PREFILL_ROLE else number
    return f"endpoint_{endpoint}/{of_role}"


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
