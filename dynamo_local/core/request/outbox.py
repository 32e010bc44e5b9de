"""The tokens that a worker keeps of its live requests, so that lost messages can be sent again. Pure.

The bus may lose messages when a connection breaks. A worker therefore keeps the tokens of a request until its frontend
has acknowledged them, and the last ones until the frontend cancels the request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from dynamo_local.core.messages.tokens import TokenDelta
from dynamo_local.core.messages.work import Progress, RequestEpoch


@dataclass
class Kept:
    """An epoch of a request at its worker: its frontend, and the deltas that the frontend has not acknowledged."""

    frontend: str
    position: int
    """The next position that the engine generates."""
    deltas: deque[TokenDelta] = field(default_factory=deque)
    finished_at: float | None = None
    sent_at: float = 0.0
    """When the last delta was last sent (CLOCK_MONOTONIC, s)."""
    held: bool = False
    """Whether the engine keeps the KV blocks after the request has finished."""

    def add(self, delta: TokenDelta, now: float) -> None:
        self.deltas.append(delta)
        self.position = delta.position + len(delta.token_ids)
        if delta.finish is not None:
            self.finished_at = self.sent_at = now

    def trim(self, below: int) -> None:
        """Forget deltas that lie wholly below a position; never the last one."""
        while self.deltas and self.deltas[0].finish is None and _end(self.deltas[0]) <= below:
            self.deltas.popleft()

    def since(self, current: RequestEpoch, position: int) -> tuple[TokenDelta, ...]:
        """Return all deltas from a position on; if there is none yet, an empty delta as a sign of life."""
        missing = tuple(d for d in self.deltas if _end(d) > position or d.finish is not None)
        return missing or (TokenDelta(current.request_id, current.epoch, self.position, []),)


class Outbox:
    """All epochs of a worker whose frontends have not cancelled them."""

    def __init__(self) -> None:
        self._kept: dict[RequestEpoch, Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def open(self, request: RequestEpoch, frontend: str, position: int, *, held: bool = False) -> bool:
        """Begin to keep a new epoch. Return False if it is kept already: the submission arrived twice."""
        if request in self._kept:
            return False
        self._kept[request] = Kept(frontend, position, held=held)
        return True

    def get(self, request: RequestEpoch) -> Kept | None:
        return self._kept.get(request)

    def trim(self, acknowledged: Iterable[Progress]) -> None:
        """Forget the deltas that frontends have acknowledged. Unknown epochs are ignored."""
        for progress in acknowledged:
            if (kept := self._kept.get(RequestEpoch(progress.request_id, progress.epoch))) is not None:
                kept.trim(progress.position)

    def forget(self, requests: Iterable[RequestEpoch]) -> list[RequestEpoch]:
        """Drop these epochs. Return those of which the engine still has something: they are running, or held."""
        dropped = [(request, self._kept.pop(request, None)) for request in requests]
        return [request for request, kept in dropped if kept is not None and (kept.held or kept.finished_at is None)]

    def held(self) -> list[RequestEpoch]:
        """Return the epochs whose KV blocks are kept for readers after their end."""
        return [request for request, kept in self._kept.items() if kept.held]

    def running(self) -> dict[RequestEpoch, str]:
        """Return the unfinished epochs, with their frontends."""
        return {request: kept.frontend for request, kept in self._kept.items() if kept.finished_at is None}

    def all(self) -> list[RequestEpoch]:
        return list(self._kept)

    def of_frontend(self, frontend: str) -> list[RequestEpoch]:
        return [request for request, kept in self._kept.items() if kept.frontend == frontend]

    def finished_before(self, time: float) -> list[RequestEpoch]:
        """Return the epochs that finished before then (CLOCK_MONOTONIC, s) and have not been cancelled."""
        return [
            request for request, kept in self._kept.items() if kept.finished_at is not None and kept.finished_at < time
        ]

    def resend_ends(self, now: float, sent_before: float, most: int) -> list[tuple[str, TokenDelta]]:
        """Return the last deltas of finished epochs that their frontends have not cancelled, with these frontends.

        Only deltas last sent before `sent_before`, at most `most`, those sent longest ago first. They count as sent
        now.
        """
        due = [kept for kept in self._kept.values() if kept.finished_at is not None and kept.sent_at < sent_before]
        due = sorted(due, key=lambda kept: kept.sent_at)[:most]
        for kept in due:
            kept.sent_at = now
        return [(kept.frontend, kept.deltas[-1]) for kept in due]


def _end(delta: TokenDelta) -> int:
    return delta.position + len(delta.token_ids)
