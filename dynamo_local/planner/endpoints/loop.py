"""The planner's loop for endpoints: pull, decide, order, record. The decisions are made in core/planning/endpoints."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from fractions import Fraction

from dynamo_local.core.messages.endpoints import EndpointStatus
from dynamo_local.core.planning.endpoints.decide import Memories, decide
from dynamo_local.core.planning.endpoints.decision import (
    EndpointDecision,
    EndpointRecorder,
    EndpointsObservation,
    OrderOutcome,
    ScaleEndpoint,
)
from dynamo_local.core.planning.options import PlannerOptions

_log = logging.getLogger(__name__)


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
        self.devices = Fraction(0)
        """Devices that endpoints have after the last decision, those included whose workers are still to start."""

    async def run(self) -> None:
        """Plan until cancelled. Raises NotRunningError when the server has ended."""
        while True:
            await self.turn()
            await asyncio.sleep(self._options.metric_pulling_interval)

    async def turn(self) -> tuple[EndpointDecision, ...]:
        """Pull once, decide, and give the orders."""
        observation = await self._pull()
        planned = decide(observation, self._memories, self._options)
        self._memories, self.devices = planned.memories, planned.devices
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
