"""Follows what the server does to endpoints by itself: parks them, wakes them, has them swap devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_local.bus.nats import Bus
from dynamo_local.core.messages.events import Event
from dynamo_local.core.planning.endpoints.recording import EndpointRecorder
from dynamo_local.core.subjects import Subjects


@dataclass(frozen=True)
class ChangesOfServer:
    """Has recorders note it, beside the planner's own decisions."""

    bus: Bus
    subjects: Subjects
    recorders: Sequence[EndpointRecorder]

    async def start(self) -> None:
        """Listen from now on."""
        await self.bus.listen(self.subjects.endpoint_changes, Event, self._on_change)

    async def _on_change(self, event: Event) -> None:
        for recorder in self.recorders:
            recorder.endpoint_changed(event)
