"""Counts what a worker has done since it started, for metrics and the planner."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from dynamo_local.core.fleet.rates import RateMeter
from dynamo_local.core.messages.presence import Counts, EngineRates
from dynamo_local.core.messages.work import SCHEDULED, RequestEpoch, TokenDelta
from dynamo_local.core.ports import Step


class Counters:
    """Counts epochs, tokens and the time spent prefilling; `Counts` says what each figure means."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests = self._prompt_tokens = self._output_tokens = 0
        self._prefill_s = 0.0
        """Seconds up to `_looked_at`."""
        self._looked_at = clock()
        self._beginnings: dict[RequestEpoch, int] = {}
        """Epochs without a token yet, each with the length of its context in tokens."""

    @property
    def counts(self) -> Counts:
        self._look()
        return Counts(self._requests, self._prompt_tokens, self._output_tokens, self._prefill_s)

    def taken(self, request: RequestEpoch, tokens: int) -> None:
        """Count a submission; `tokens` is the length of its context."""
        self._look()
        self._requests += 1
        self._beginnings[request] = tokens

    def computed(self, deltas: Iterable[TokenDelta]) -> dict[RequestEpoch, int]:
        """Count the output of a step, that of cancelled requests included: it was computed. Returns the number of
        context tokens that were computed for each epoch whose first token this is."""
        self._look()
        computed: dict[RequestEpoch, int] = {}
        for delta in deltas:
            self._output_tokens += len(delta.token_ids)
            if delta.cached_tokens is not None:
                request = RequestEpoch(delta.request_id, delta.epoch)
                began_with = self._beginnings.pop(request, None)
                if began_with is not None:
                    computed[request] = max(began_with - delta.cached_tokens, 0)
        self._prompt_tokens += sum(computed.values())
        return computed

    def forgotten(self, requests: Iterable[RequestEpoch]) -> None:
        """Note that these epochs bring no more tokens."""
        self._look()
        for request in requests:
            self._beginnings.pop(request, None)

    def _look(self) -> None:
        """Add the time since the last call. Called before every change: the state was the same all that time."""
        now = self._clock()
        if self._beginnings:
            self._prefill_s += now - self._looked_at
        self._looked_at = now


# Measures an engine by the steps that it reports: how fast it computes prompts and decodes, how long requests run.

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


# Events of single epochs, for code that waits until a request has been computed or forgotten.


@dataclass
class EpochListener:
    """Events of one epoch, set when they have happened."""

    computed: asyncio.Event = field(default_factory=asyncio.Event)
    """The engine has finished the epoch, or it was cancelled."""
    forgotten: asyncio.Event = field(default_factory=asyncio.Event)
    """The worker has nothing left of the epoch: the frontend has acknowledged its end, or is gone."""


class EpochEvents:
    """The listeners of one worker. Events of epochs that have none are ignored."""

    def __init__(self) -> None:
        self._listeners: dict[RequestEpoch, EpochListener] = {}

    def add(self, request: RequestEpoch) -> EpochListener:
        """Listen to an epoch until it is forgotten."""
        listener = self._listeners[request] = EpochListener()
        return listener

    def computed(self, request: RequestEpoch) -> None:
        """Report that the epoch has finished."""
        if (listener := self._listeners.get(request)) is not None:
            listener.computed.set()

    def forgotten(self, requests: Iterable[RequestEpoch]) -> None:
        """Report that nothing is left of these epochs."""
        for request in requests:
            if (listener := self._listeners.pop(request, None)) is not None:
                listener.computed.set()
                listener.forgotten.set()
