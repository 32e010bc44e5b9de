"""The port to whatever shows the planner's observations and decisions: event files, metrics, a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dynamo_local.core.planning.actions import ActionOutcome
from dynamo_local.core.planning.decision import Decision
from dynamo_local.core.planning.observation import Observation


class Recorder(Protocol):
    """Receives observations and decisions in order, from one caller. Calls return at once: slow writes belong in a
    thread of the recorder."""

    def observed(self, observation: Observation) -> None:
        """Record a pull."""

    def decided(self, decision: Decision, outcomes: Sequence[ActionOutcome]) -> None:
        """Record a decision. `outcomes` are those of the decision's actions, in their order: none if there are no
        actions or the planner only observes, and fewer than actions if the planner was stopped meanwhile."""

    def close(self) -> None:
        """Write out what is left. No call follows."""
