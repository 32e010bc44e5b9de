"""Measures an engine by the steps that it reports: how fast it computes prompts and decodes, how long requests run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from dynamo_local.core.fleet.rates import RateMeter
from dynamo_local.core.messages.presence import EngineRates
from dynamo_local.core.messages.tokens import SCHEDULED, TokenDelta
from dynamo_local.core.messages.work import RequestEpoch
from dynamo_local.core.ports import Step

_FORGOTTEN_AFTER_S = 60.0
"""Idle time after which what was measured is forgotten: what slowed the engine may be over, and a router that avoids a
slow worker for that would never learn."""


class StepMeter:
    """Measures one engine. Moments are of CLOCK_MONOTONIC, in seconds."""

    def __init__(self) -> None:
        self._meter = RateMeter()
        self._admitted_at: dict[RequestEpoch, float] = {}
        """When the engine admitted the requests that have a token."""
        self._stepped_at: float | None = None
        """When the last step ended; None if the engine has been idle since."""
        self._last_at = -math.inf
        """When the last step ended."""

    def rates(self, now: float) -> EngineRates | None:
        """Return what was measured; None: nothing yet, or nothing lately."""
        if now - self._last_at > _FORGOTTEN_AFTER_S:
            self._meter = RateMeter()
        return self._meter.rates

    def stepped(self, step: Step, computed: Mapping[RequestEpoch, int]) -> None:
        """Note a step. `computed`: number of tokens that the requests whose first token it brings had to compute."""
        now, began_at = step.timestamp, self._stepped_at
        self._last_at = now
        begun: list[tuple[float, int]] = []
        ended, decodes = 0, True
        for delta in step.deltas:
            request, waited_s = RequestEpoch(delta.request_id, delta.epoch), _since_admission(delta)
            decodes = decodes and delta.cached_tokens is None
            if request in computed and waited_s is not None:
                self._admitted_at[request] = now - waited_s
                begun.append((now - waited_s, computed[request]))
            if delta.finish is not None:
                ended += 1
                self.forgotten([request], now)
        self._meter.begun(now, begun)
        running = None if step.load is None else step.load.running
        # A running request that brings no token has its prompt computed.
        if decodes and began_at is not None and running is not None and len(step.deltas) == running + ended > 0:
            self._meter.decoded(now - began_at, len(step.deltas))
        self._stepped_at = now if running else None

    def forgotten(self, requests: Iterable[RequestEpoch], now: float) -> None:
        """Note that these requests run no more, finished or not. Those that did not run are ignored."""
        for request in requests:
            admitted_at = self._admitted_at.pop(request, None)
            if admitted_at is not None:
                self._meter.ended(now - admitted_at)


def _since_admission(delta: TokenDelta) -> float | None:
    """Seconds since the engine has first admitted the request; None if the delta does not tell."""
    return next((age_s for kind, age_s in delta.events if kind == SCHEDULED), None)
