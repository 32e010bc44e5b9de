"""Counts what a worker has done since it started, for metrics and the planner."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from dynamo_local.core.messages.presence import Counts
from dynamo_local.core.messages.tokens import TokenDelta
from dynamo_local.core.messages.work import RequestEpoch


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
