"""The planner's loop: pull, decide, change, and tell. What is decided, and how, stands in core/planning."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from dynamo_local.core.errors import DynamoError
from dynamo_local.core.planning.actions import ActionOutcome, Actuator, Change, DeviceLimits, roles_of
from dynamo_local.core.planning.decide import decide
from dynamo_local.core.planning.decision import Decision
from dynamo_local.core.planning.observation import Observation
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.recording import Recorder
from dynamo_local.core.planning.window import History, aggregate, remember

_log = logging.getLogger(__name__)

RECONCILE_EVERY_S = 60.0
"""A planner that was killed leaves a change half done, and the server finishes it. This is for what it cannot see."""

Pull = Callable[[], Awaitable[Observation]]
OnChange = Callable[[Change | None], None]


class PlannerLoop:
    """Watches one server and changes what runs on it, one change at a time.

    While a change is under way nothing is pulled: workers that come and go make the metrics meaningless. `on_change`
    is told of each change when it begins, and None when it is over.
    """

    def __init__(
        self,
        options: PlannerOptions,
        pull: Pull,
        actuator: Actuator,
        recorders: Sequence[Recorder] = (),
        on_change: OnChange = lambda _: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._pull = pull
        self._actuator = actuator
        self._recorders = tuple(recorders)
        self._on_change = on_change
        self._clock = clock
        self._history: History = ()
        self._reconciled_at: float | None = None

    async def run(self) -> None:
        """Until cancelled. Raises NotRunningError when the server has ended."""
        while True:
            await self._reconcile_now_and_then()
            await self.adjust()

    async def adjust(self) -> Decision:
        """One adjustment interval, and the changes at its end."""
        window = aggregate(await self._watch_for_an_interval())
        decision = decide(window, self._history, self._options, self._clock())
        _log.log(logging.INFO if decision.changes else logging.DEBUG, "%s", decision.text)
        outcomes: list[ActionOutcome] = []
        try:
            if not self._options.no_operation:
                await self._carry_out(decision, outcomes)
        finally:
            # Also if the planner is ended meanwhile: what was begun is not to be a secret.
            for recorder in self._recorders:
                recorder.decided(decision, outcomes)
        failed = frozenset(role for outcome in outcomes if not outcome.done for role in roles_of(outcome.change))
        self._history = remember(self._history, replace(window, failed=failed), self._options)
        return decision

    async def _watch_for_an_interval(self) -> list[Observation]:
        """Pulls until the interval is over. The last one is made at its end."""
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
            for change in decision.changes:
                outcomes.append(await self._change(change, limits))
        finally:
            self._on_change(None)

    async def _change(self, change: Change, limits: DeviceLimits) -> ActionOutcome:
        self._on_change(change)
        begun = self._clock()
        try:
            outcome = await self._actuator.apply(change, limits)
        except DynamoError as error:
            # Told like a change that was undone. Whether the server still runs, the next pull shows.
            outcome = ActionOutcome(change, False, None, str(error), self._clock() - begun)
        _log.log(logging.INFO if outcome.done else logging.WARNING, "%s: %s", outcome.watcher or "-", outcome.note)
        return outcome

    async def _reconcile_now_and_then(self) -> None:
        now = self._clock()
        due = self._reconciled_at is None or now - self._reconciled_at >= RECONCILE_EVERY_S
        if self._options.no_operation or not due:
            return
        self._reconciled_at = now
        try:
            notes = await self._actuator.reconcile()
        except DynamoError as error:
            _log.warning("what runs cannot be looked over now: %s", error)
            return
        for note in notes:
            _log.info("%s", note)
