"""Telling workers how far a frontend has got with their requests: asking for news after a gap in their tokens, and when
nothing was heard of a request for a while; acknowledging what has come."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from components.frontend.requests import LiveRequest
from dynamo_local.core.messages.work import Ack, Resend
from dynamo_local.core.request.recovery import RecoveryDeadlines
from dynamo_local.tasks import TaskGuard

_ACK_EVERY = 256
"""Tokens of one request between two acknowledgements."""


class Retransmitter:
    """Of one frontend. `tell` says something to a worker that will be said again if it is lost."""

    def __init__(
        self,
        frontend: str,
        patience: RecoveryDeadlines,
        tasks: TaskGuard,
        tell: Callable[[str, Ack | Resend], Coroutine[Any, Any, None]],
    ) -> None:
        self._frontend = frontend
        self._patience = patience
        self._tasks = tasks
        self._tell = tell

    def about_gap(self, live: LiveRequest, now: float) -> None:
        """Tokens came that do not continue its log: ask for those between, unless that has just been asked."""
        if live.log.worker is not None and now - live.asked_at >= self._patience.gap_s:
            live.asked_at = now
            question = Resend(frontend=self._frontend, progress=(live.progress,))
            self._tasks.spawn(f"resend {live.request_id}", self._tell(live.log.worker, question))

    async def about_silence(self, requests: Iterable[LiveRequest], now: float) -> None:
        """Ask after those of which nothing has been heard for too long, each worker once for all of its own."""
        silent: defaultdict[str, list[LiveRequest]] = defaultdict(list)
        for live in requests:
            if live.log.worker is not None and now - live.heard_at > self._patience.silence_s:
                live.heard_at = now
                silent[live.log.worker].append(live)
        for worker, theirs in silent.items():
            await self._tell(worker, Resend(self._frontend, tuple(live.progress for live in theirs)))

    async def acknowledge(self, worker: str, requests: Sequence[LiveRequest]) -> None:
        """Have a worker forget what has come from it of these, now and then."""
        due = [live for live in requests if live.log.position - live.acked >= _ACK_EVERY]
        if due:
            await self._tell(worker, Ack(progress=tuple(live.progress for live in due)))
        for live in due:
            live.acked = live.log.position
