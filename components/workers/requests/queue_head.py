"""What the first request of an engine's queue needs, as far as its worker can tell without asking the engine.

An engine tells how many requests wait, not which. But every request that runs brings a token with each step, unless
its prompt is being computed; and engines admit in order. So of those that a step has brought nothing for, the last ones
in order wait, as many as the engine says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dynamo_local.core.messages.tokens import TokenDelta
from dynamo_local.core.messages.work import RequestEpoch, Submit


@dataclass
class _Context:
    order: tuple[int, float]
    """As engines admit: priority, the lower the earlier, then arrival."""
    tokens: int
    brought_at: int = 0
    """The last step that has brought a token."""


class QueueHead:
    """Of one engine."""

    def __init__(self) -> None:
        self._contexts: dict[RequestEpoch, _Context] = {}
        self._step = 0

    def taken(self, work: Submit) -> None:
        """A request has come."""
        context = _Context((work.priority, work.arrival_time), len(work.token_ids))
        self._contexts[RequestEpoch(work.request_id, work.epoch)] = context

    def stepped(self, deltas: Iterable[TokenDelta]) -> None:
        """A step is over, and has brought these."""
        self._step += 1
        for delta in deltas:
            request = RequestEpoch(delta.request_id, delta.epoch)
            if delta.finish is not None:
                self._contexts.pop(request, None)
            elif (context := self._contexts.get(request)) is not None:
                context.tokens += len(delta.token_ids)
                context.brought_at = self._step

    def forgotten(self, requests: Iterable[RequestEpoch]) -> None:
        """These are not worked on any more."""
        for request in requests:
            self._contexts.pop(request, None)

    def tokens(self, waiting: int | None) -> int | None:
        """What the first of so many waiting requests needs, in tokens; 0 if none waits, None if that is not known."""
        if not waiting:
            return waiting
        silent = [context for context in self._contexts.values() if context.brought_at < self._step]
        silent.sort(key=lambda context: context.order)
        return silent[max(len(silent) - waiting, 0)].tokens if silent else None
