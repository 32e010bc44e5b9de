"""Estimates how many tokens the first request in an engine's queue needs, from what its steps bring.

An engine reports how many requests wait, not which. But every running request brings a token with each step, unless its
prompt is being computed; and engines admit in order. So of the requests without a token in the last step, those that
come last in that order are waiting, as many as the engine says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dynamo_local.core.messages.tokens import TokenDelta
from dynamo_local.core.messages.work import RequestEpoch, Submit


@dataclass
class _Context:
    order: tuple[int, float]
    """The order in which engines admit: by priority, the lowest first, then by arrival."""
    tokens: int
    brought_at: int = 0
    """Number of the last step that brought a token."""


class QueueHead:
    """The contexts of one engine's unfinished requests, with their lengths in tokens."""

    def __init__(self) -> None:
        self._contexts: dict[RequestEpoch, _Context] = {}
        self._step = 0

    def taken(self, work: Submit) -> None:
        """Note a submission."""
        context = _Context((work.priority, work.arrival_time), len(work.token_ids))
        self._contexts[RequestEpoch(work.request_id, work.epoch)] = context

    def stepped(self, deltas: Iterable[TokenDelta]) -> None:
        """Note the output of a step."""
        self._step += 1
        for delta in deltas:
            request = RequestEpoch(delta.request_id, delta.epoch)
            if delta.finish is not None:
                self._contexts.pop(request, None)
            elif (context := self._contexts.get(request)) is not None:
                context.tokens += len(delta.token_ids)
                context.brought_at = self._step

    def forgotten(self, requests: Iterable[RequestEpoch]) -> None:
        """Drop requests that the engine does not work on any more."""
        for request in requests:
            self._contexts.pop(request, None)

    def tokens(self, waiting: int | None) -> int | None:
        """Tokens that the first of `waiting` requests needs; 0 if none waits, None if that is not known."""
        if not waiting:
            return waiting
        silent = [context for context in self._contexts.values() if context.brought_at < self._step]
        silent.sort(key=lambda context: context.order)
        return silent[max(len(silent) - waiting, 0)].tokens if silent else None
