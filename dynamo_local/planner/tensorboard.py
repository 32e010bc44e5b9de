"""A recorder (core/planning/recording.py) that writes event files for TensorBoard.

TensorBoard's own writer is used, which needs neither torch nor TensorFlow.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from dynamo_local.core.errors import ConfigError
from dynamo_local.core.messages.events import Event
from dynamo_local.core.planning.actions import ActionOutcome
from dynamo_local.core.planning.decision import Decision
from dynamo_local.core.planning.endpoints.decision import EndpointDecision, OrderOutcome
from dynamo_local.core.planning.endpoints.observation import EndpointsObservation
from dynamo_local.core.planning.observation import Observation
from dynamo_local.planner.endpoints.series import of_endpoints, text_of_endpoint
from dynamo_local.planner.event_folder import RUN_FORMAT, EventFolder
from dynamo_local.planner.series import of_decision, of_observation, of_observation_as_dynamo, text_of
from dynamo_local.planner.thinned import Thinned

try:
    from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
    from tensorboard.plugins.text.metadata import create_summary_metadata
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
