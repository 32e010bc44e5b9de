"""The planner's loop: pull, decide, act, record. The decisions themselves are made in core/planning."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from dynamo_local.core.errors import DynamoError
from dynamo_local.core.planning.actions import Action, ActionOutcome, AddWorker, DeviceLimits, roles_of
from dynamo_local.core.planning.decide import decide
from dynamo_local.core.planning.decision import Decision, Recorder, describe, event_of
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.proposals import held_after
from dynamo_local.core.planning.window import History, Observation, Window, aggregate, remember

_log = logging.getLogger(__name__)

Pull = Callable[[], Awaitable[Observation]]
TakeAction = Callable[[Action, DeviceLimits, str], Awaitable[ActionOutcome]]
"""Has an action carried out, and returns once it is complete or undone: an added worker takes requests by then, a
removed one has ended and its devices are free. The text: for what reasons. Raises DynamoError."""
OnAction = Callable[[Action | None], None]


class PlannerLoop:
    """Watches one server and acts on its workers, one action at a time.

    While an action is under way nothing is pulled: workers that come and go make the metrics meaningless. `on_action`
    is called with each action when it begins, and with None when all are over.
    """

    def __init__(
        self,
        options: PlannerOptions,
        pull: Pull,
        take_action: TakeAction,
        recorders: Sequence[Recorder] = (),
        on_action: OnAction = lambda _: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._pull = pull
        self._take_action = take_action
        self._recorders = tuple(recorders)
        self._on_action = on_action
        self._clock = clock
        self._history: History = ()
        self._gist: tuple[str, ...] = ()
        """The gist of the last decision."""
        self.devices = 0.0
        """Devices that the graph's own workers have while an action is under way, those of a worker to be added
        included; 0 at other times."""

    async def run(self) -> None:
        """Plan until cancelled. Raises NotRunningError when the server has ended."""
        while True:
            await self.adjust()

    async def adjust(self) -> Decision:
        """Watch for one adjustment interval, then decide and act."""
        window = aggregate(await self._watch_for_an_interval())
        decision = decide(window, self._history, self._options, self._clock())
        self._log_decision(decision)
        outcomes: list[ActionOutcome] = []
        try:
            if not self._options.no_operation:
                self.devices = held_after(window, decision.actions, self._options)
                await self._carry_out(decision, outcomes)
        finally:
            # Also if the planner is stopped meanwhile: actions that have begun must be on record.
            for recorder in self._recorders:
                recorder.decided(decision, outcomes)
        self._history = remember(self._history, _with_outcomes(window, outcomes), self._options)
        return decision

    def _log_decision(self, decision: Decision) -> None:
        """Log a decision with actions. A planner that only observes would repeat it at each interval."""
        repeats, self._gist = decision.gist == self._gist, decision.gist
        if decision.actions and (decision.acts or not repeats):
            _log.info("%s", decision.text)
        elif not decision.actions:
            _log.debug("%s", decision.text)

    async def _watch_for_an_interval(self) -> list[Observation]:
        """Pull until the interval is over. The last pull is made at its end."""
        begun = self._clock()
        end = begun + self._options.adjustment_interval
        pulls = [await self._observe()]
        while (left := end - self._clock()) > 0:
            await asyncio.sleep(min(self._options.metric_pulling_interval, left))
            pulls.append(await self._observe())
        return pulls

    async def _observe(self) -> Observation:
        observation = await self._pull()
        for recorder in self._recorders:
            recorder.observed(observation)
        return observation

    async def _carry_out(self, decision: Decision, outcomes: list[ActionOutcome]) -> None:
        limits = DeviceLimits(decision.max_devices)
        try:
            for action in decision.actions:
                outcomes.append(await self._apply(action, limits, decision.reasons))
        finally:
            self.devices = 0.0
            self._on_action(None)

    async def _apply(self, action: Action, limits: DeviceLimits, why: str) -> ActionOutcome:
        self._on_action(action)
        begun = self._clock()
        try:
            outcome = await self._take_action(action, limits, why)
        except DynamoError as error:
            # Recorded like an action that was undone. The next pull shows whether the server still runs.
            outcome = ActionOutcome(action, False, None, str(error), self._clock() - begun)
        event = event_of(outcome, "")
        level = logging.INFO if outcome.done else logging.WARNING
        _log.log(level, "%s: %s", event.watcher or describe(action), event.what)
        return outcome


def _with_outcomes(window: Window, outcomes: Sequence[ActionOutcome]) -> Window:
    failed = frozenset(role for outcome in outcomes if not outcome.done for role in roles_of(outcome.action))
    added = frozenset(
        outcome.action.role for outcome in outcomes if outcome.done and isinstance(outcome.action, AddWorker)
    )
    return replace(window, failed=failed, added=added)
