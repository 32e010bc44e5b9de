"""The port to whatever shows what the planner sees and does: event files, metrics, a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dynamo_local.core.planning.actions import ActionOutcome
from dynamo_local.core.planning.decision import Decision
from dynamo_local.core.planning.observation import Observation


class Recorder(Protocol):
    """Told everything, in order, by one caller. Calls are quick, or hand over to a thread of the recorder's own."""

    def observed(self, observation: Observation) -> None:
        """A pull has been made."""

    def decided(self, decision: Decision, outcomes: Sequence[ActionOutcome]) -> None:
        """An adjustment is complete. `outcomes` belong to the decision's changes, in their order; there are none when
        nothing is to be changed, or the planner only observes, and too few when it was ended meanwhile."""

    def close(self) -> None:
        """Nothing more comes. Writes out what is left."""
