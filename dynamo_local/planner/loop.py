"""The planner's loop: pull, decide, act, record. The decisions themselves are made in core/planning."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence

from dynamo_local.core.errors import DynamoError
from dynamo_local.core.messages.endpoints import EndpointStatus
from dynamo_local.core.planning.actions import (
    Action,
    ActionOutcome,
    OrderOutcome,
    Outcome,
    ScaleEndpoint,
)
from dynamo_local.core.planning.decide import Memories, decide
from dynamo_local.core.planning.decision import Decision, Recorder, describe, event_of
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.window import Observation

_log = logging.getLogger(__name__)

Pull = Callable[[], Awaitable[Observation]]
TakeAction = Callable[[Action, int, str], Awaitable[ActionOutcome]]
"""Has an action carried out within a number of devices for all workers, and returns once it is complete or undone: an
added worker takes requests by then, a removed one has ended and its devices are free. The text: for what reasons.
Raises DynamoError."""
Scale = Callable[[ScaleEndpoint], Awaitable[tuple[OrderOutcome, EndpointStatus | None]]]
"""Gives an order. Returns what became of it, and the endpoint's status after it if it is carried out."""


class PlannerLoop:
    """Watches the endpoints of one server, and has their workers changed.

    Numbers are ordered at every pull: the server starts and ends the workers after its answer. Actions are taken one at
    a time, which may last minutes; meanwhile the loop goes on for the other endpoints.
    """

    def __init__(
        self,
        options: PlannerOptions,
        pull: Pull,
        take_action: TakeAction,
        scale: Scale,
        recorders: Sequence[Recorder] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._pull = pull
        self._take_action = take_action
        self._scale = scale
        self._recorders = tuple(recorders)
        self._clock = clock
        self._memories: Memories = {}
        self._gists: dict[str, tuple[str, ...]] = {}
        """By endpoint, the gist of its last decision."""
        self._acting: dict[str, asyncio.Task[list[ActionOutcome]]] = {}
        """By endpoint, the actions that are under way, or over since the last pull."""

    async def run(self) -> None:
        """Plan until cancelled. Raises NotRunningError when the server has ended."""
        try:
            while True:
                decisions = await self.turn()
                await asyncio.sleep(self._pause_s(decisions))
        finally:
            await self.close()

    async def turn(self) -> tuple[Decision, ...]:
        """Pull once, decide, and give the orders. Actions begin, and go on after the return."""
        self._note_what_was_done()
        observation = await self._pull()
        planned = decide(observation, self._memories, self._options)
        self._memories = planned.memories
        for recorder in self._recorders:
            recorder.observed(observation, planned.decisions)
        await asyncio.gather(*(self._carry_out(decision, observation.board) for decision in planned.decisions))
        kept = {decision.endpoint for decision in planned.decisions}
        kept |= {seen.name for seen in observation.endpoints if seen.by_actions}
        self._gists = {endpoint: gist for endpoint, gist in self._gists.items() if endpoint in kept}
        return planned.decisions

    async def close(self) -> None:
        """Wait for no action any more, and record the decisions whose actions have begun."""
        for acting in self._acting.values():
            acting.cancel()
        await asyncio.gather(*self._acting.values(), return_exceptions=True)

    def _pause_s(self, decisions: Sequence[Decision]) -> float:
        """Seconds until the next pull. An interval ends with a pull at its very end, and the next one begins there."""
        if any(decision.by_actions for decision in decisions):
            return 0.0
        begun = min((memory.pulls[0].at for memory in self._memories.values() if memory.pulls), default=math.inf)
        left = begun + self._options.adjustment_interval - self._clock()
        return max(0.0, min(self._options.metric_pulling_interval, left))

    def _note_what_was_done(self) -> None:
        for endpoint in [each for each, acting in self._acting.items() if acting.done()]:
            memory = self._memories[endpoint].acted(self._acting.pop(endpoint).result())
            self._memories = {**self._memories, endpoint: memory}

    async def _carry_out(self, decision: Decision, board: int) -> None:
        repeats = self._gists.get(decision.endpoint) == decision.gist
        self._gists[decision.endpoint] = decision.gist
        order = decision.order if decision.acts else None
        if decision.by_actions:
            _log_decision(decision, repeats)
            if decision.acts and decision.actions:
                self._acting[decision.endpoint] = asyncio.create_task(self._act(decision), name="planner's actions")
            else:
                self._record(decision, ())
        elif order is not None:
            outcome = await self._give(order, board)
            if outcome.done:
                _log_decision(decision, repeats)
            else:
                _log.warning("%s: not done: %s", decision.text, outcome.note)
            self._record(decision, (outcome,))
        elif not repeats:
            _log_decision(decision, repeats)
            self._record(decision, ())

    def _record(self, decision: Decision, outcomes: Sequence[Outcome]) -> None:
        for recorder in self._recorders:
            recorder.decided(decision, outcomes)

    def _note(self, action: Action | None) -> None:
        for recorder in self._recorders:
            recorder.acting(action)

    async def _give(self, order: ScaleEndpoint, board: int) -> OrderOutcome:
        outcome, status = await self._scale(order)
        memory = self._memories[order.name]
        if status is not None:
            memory = memory.answered(board, status.wanted, status.wanted_prefill)
        elif not outcome.done:
            memory = memory.refused(self._clock() + self._options.adjustment_interval)
        self._memories = {**self._memories, order.name: memory}
        return outcome

    async def _act(self, decision: Decision) -> list[ActionOutcome]:
        outcomes: list[ActionOutcome] = []
        try:
            for action in decision.actions:
                outcomes.append(await self._apply(action, decision))
        finally:
            self._note(None)
            # Also if the planner is stopped meanwhile: actions that have begun must be on record.
            self._record(decision, outcomes)
        return outcomes

    async def _apply(self, action: Action, decision: Decision) -> ActionOutcome:
        self._note(action)
        begun = time.monotonic()
        try:
            outcome = await self._take_action(action, decision.max_devices, decision.reasons)
        except DynamoError as error:
            # Recorded like an action that was undone. The next pull shows whether the server still runs.
            outcome = ActionOutcome(action, False, None, str(error), time.monotonic() - begun)
        event = event_of(outcome, "")
        level = logging.INFO if outcome.done else logging.WARNING
        _log.log(level, "%s: %s", event.watcher or describe(action), event.what)
        return outcome


def _log_decision(decision: Decision, repeats: bool) -> None:
    """Log a decision that changes something. A planner that only observes would repeat it again and again."""
    if not decision.changes:
        _log.debug("%s", decision.text)
    elif decision.acts or not repeats:
        _log.info("%s", decision.text)
