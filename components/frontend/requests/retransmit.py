"""Asks workers to send tokens again, after a gap or a silence, and acknowledges the tokens that have arrived."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from components.frontend.requests.live_requests import LiveRequest
from components.frontend.worker_link import WorkerLink
from dynamo_local.core.request.recovery import RecoveryDeadlines
from dynamo_local.tasks import TaskGuard

_ACK_EVERY = 256
"""Tokens of one request between two acknowledgements."""


class Retransmitter:
    """Keeps the tokens of one frontend's requests complete although the bus may lose messages."""

    def __init__(self, link: WorkerLink, tasks: TaskGuard, deadlines: RecoveryDeadlines) -> None:
        self._link = link
        self._tasks = tasks
        self._deadlines = deadlines

    def ask_after_gap(self, live: LiveRequest, now: float) -> None:
        """Tokens arrived that lie beyond the end of the log: ask for those between, unless that was done just now."""
        worker = live.log.worker
        if worker is not None and live.recovery.ask_resend(now, self._deadlines.gap_s):
            self._tasks.spawn(f"resend {live.request_id}", self._link.ask_resend(worker, (live.progress,)))

    async def ask_after_silence(self, requests: Iterable[LiveRequest], now: float) -> None:
        """Ask for those requests of which nothing was heard for too long: each worker once, for all of its own."""
        silent: defaultdict[str, list[LiveRequest]] = defaultdict(list)
        for live in requests:
            if live.log.worker is not None and now - live.recovery.heard_at > self._deadlines.silence_s:
                live.recovery.hear(now)
                silent[live.log.worker].append(live)
        for worker, theirs in silent.items():
            await self._link.ask_resend(worker, tuple(live.progress for live in theirs))

    async def acknowledge(self, worker: str, requests: Sequence[LiveRequest]) -> None:
        """Acknowledge to the worker what has arrived of these requests, once there is enough of it."""
        due = [live for live in requests if live.log.position - live.recovery.acknowledged >= _ACK_EVERY]
        if due:
            await self._link.acknowledge(worker, tuple(live.progress for live in due))
        for live in due:
            live.recovery.acknowledge(live.log.position)
