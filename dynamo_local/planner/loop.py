"""The planner's loops, for the graph's own workers and for those of endpoints: pull, decide, act, record.

The decisions themselves are made in core/planning."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from dynamo_local.core.errors import DynamoError
from dynamo_local.core.messages.endpoints import EndpointStatus
from dynamo_local.core.planning.actions import Action, ActionOutcome, AddWorker, DeviceLimits, roles_of
from dynamo_local.core.planning.decide import decide
from dynamo_local.core.planning.decision import Decision, Recorder, describe, event_of
from dynamo_local.core.planning.endpoints.decide import Memories
from dynamo_local.core.planning.endpoints.decide import decide as decide_on_endpoints
from dynamo_local.core.planning.endpoints.decision import (
    EndpointDecision,
    EndpointRecorder,
    EndpointsObservation,
    OrderOutcome,
    ScaleEndpoint,
)
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.proposals import held_after
from dynamo_local.core.planning.window import History, Observation, Window, aggregate, remember
from dynamo_local.planner.metrics import Promised

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
        promised: Promised | None = None,
    ) -> None:
        self._options = options
        self._pull = pull
        self._take_action = take_action
        self._recorders = tuple(recorders)
        self._on_action = on_action
        self._history: History = ()
        self._gist: tuple[str, ...] = ()
        """The gist of the last decision."""
        self.promised = promised or Promised()

    async def run(self) -> None:
        """Plan until cancelled. Raises NotRunningError when the server has ended."""
        while True:
            await self.adjust()

    async def adjust(self) -> Decision:
        """Watch for one adjustment interval, then decide and act."""
        window = aggregate(await self._watch_for_an_interval())
        decision = decide(window, self._history, self._options, time.monotonic())
        self._log_decision(decision)
        outcomes: list[ActionOutcome] = []
        try:
            if not self._options.no_operation:
                self.promised.own = held_after(window, decision.actions, self._options)
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
        begun = time.monotonic()
        end = begun + self._options.adjustment_interval
        pulls = [await self._observe()]
        while (left := end - time.monotonic()) > 0:
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
            self.promised.own = 0.0
            self._on_action(None)

    async def _apply(self, action: Action, limits: DeviceLimits, why: str) -> ActionOutcome:
        self._on_action(action)
        begun = time.monotonic()
        try:
            outcome = await self._take_action(action, limits, why)
        except DynamoError as error:
            # Recorded like an action that was undone. The next pull shows whether the server still runs.
            outcome = ActionOutcome(action, False, None, str(error), time.monotonic() - begun)
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


# For endpoints.

Scale = Callable[[ScaleEndpoint], Awaitable[tuple[OrderOutcome, EndpointStatus | None]]]
"""Gives an order. Returns what became of it, and the endpoint's status after it if it is carried out."""


class EndpointsLoop:
    """Decides at every pull how many workers each endpoint has, and orders them.

    The server starts and ends the workers after its answer, so that no change holds this loop up.
    """

    def __init__(
        self,
        options: PlannerOptions,
        pull: Callable[[], Awaitable[EndpointsObservation]],
        scale: Scale,
        recorders: Sequence[EndpointRecorder] = (),
        promised: Promised | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._pull = pull
        self._scale = scale
        self._recorders = tuple(recorders)
        self._clock = clock
        self._memories: Memories = {}
        self._gists: dict[str, tuple[str, ...]] = {}
        """By endpoint, the gist of the last decision that was recorded."""
        self.promised = promised or Promised()

    async def run(self) -> None:
        """Plan until cancelled. Raises NotRunningError when the server has ended."""
        while True:
            await self.turn()
            await asyncio.sleep(self._options.metric_pulling_interval)

    async def turn(self) -> tuple[EndpointDecision, ...]:
        """Pull once, decide, and give the orders."""
        observation = await self._pull()
        planned = decide_on_endpoints(observation, self._memories, self._options)
        self._memories, self.promised.endpoints = planned.memories, float(planned.devices)
        for recorder in self._recorders:
            recorder.endpoints_observed(observation, planned.decisions)
        await asyncio.gather(*(self._carry_out(decision, observation.board) for decision in planned.decisions))
        gone = self._gists.keys() - {decision.endpoint for decision in planned.decisions}
        for endpoint in gone:
            del self._gists[endpoint]
        return planned.decisions

    async def _carry_out(self, decision: EndpointDecision, board: int) -> None:
        order = decision.order if decision.acts else None
        if order is None and self._gists.get(decision.endpoint) == decision.gist:
            return
        self._gists[decision.endpoint] = decision.gist
        outcome = None if order is None else await self._give(order, board)
        _log_decision(decision, outcome)
        for recorder in self._recorders:
            recorder.endpoint_decided(decision, outcome)

    async def _give(self, order: ScaleEndpoint, board: int) -> OrderOutcome:
        outcome, status = await self._scale(order)
        memory = self._memories[order.name]
        if status is not None:
            memory = memory.answered(board, status.wanted, status.wanted_prefill)
        elif not outcome.done:
            memory = memory.refused(self._clock() + self._options.adjustment_interval)
        self._memories = {**self._memories, order.name: memory}
        return outcome


def _log_decision(decision: EndpointDecision, outcome: OrderOutcome | None) -> None:
    if outcome is not None and not outcome.done:
        _log.warning("%s: not done: %s", decision.text, outcome.note)
    elif decision.order is not None:
        _log.info("%s", decision.text)
    else:
        _log.debug("%s", decision.text)
