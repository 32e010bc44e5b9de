"""What a worker has done in its life, for those who watch it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from dynamo_local.core.messages.presence import Counts
from dynamo_local.core.messages.tokens import TokenDelta
from dynamo_local.core.messages.work import RequestEpoch


class Counters:
    """Counts epochs and tokens. See Counts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests = self._prompt_tokens = self._output_tokens = 0
        self._prefill_s = 0.0
        """Up to `_looked_at`."""
        self._looked_at = clock()
        self._beginnings: dict[RequestEpoch, int] = {}
        """Of epochs without a token yet: what they begin with, in tokens."""

    @property
    def counts(self) -> Counts:
        self._look()
        return Counts(self._requests, self._prompt_tokens, self._output_tokens, self._prefill_s)

    def taken(self, request: RequestEpoch, tokens: int) -> None:
        """An epoch that begins with so many tokens."""
        self._look()
        self._requests += 1
        self._beginnings[request] = tokens

    def computed(self, deltas: Iterable[TokenDelta]) -> None:
        """What a step has brought. It counts also if nobody wants it any more."""
        self._look()
        for delta in deltas:
            self._output_tokens += len(delta.token_ids)
            if delta.cached_tokens is not None:
                began_with = self._beginnings.pop(RequestEpoch(delta.request_id, delta.epoch), 0)
                self._prompt_tokens += max(began_with - delta.cached_tokens, 0)

    def forgotten(self, requests: Iterable[RequestEpoch]) -> None:
        """Nothing of these comes any more."""
        self._look()
        for request in requests:
            self._beginnings.pop(request, None)

    def _look(self) -> None:
        """Called before anything begins or ends: the time since the last look was all of a kind."""
        now = self._clock()
        if self._beginnings:
            self._prefill_s += now - self._looked_at
        self._looked_at = now
