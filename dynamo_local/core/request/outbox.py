"""What a worker keeps of its live requests, so that lost messages can be sent again. Pure.

The bus may lose messages when a connection breaks. A worker therefore keeps the tokens of a request until its
frontend has acknowledged them; the last ones until the frontend says that it is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from dynamo_local.core.messages.tokens import TokenDelta
from dynamo_local.core.messages.work import Progress, RequestEpoch


@dataclass
class Kept:
    """One epoch of one request: who wants it, and what has been produced and not acknowledged yet."""

    frontend: str
    position: int
    """The next position to be produced."""
    deltas: deque[TokenDelta] = field(default_factory=deque)
    finished_at: float | None = None
    told_at: float = 0.0
    """When its end was last told."""
    held: bool = False
    """Whether the engine keeps its KV blocks beyond its end."""

    def add(self, delta: TokenDelta, now: float) -> None:
        self.deltas.append(delta)
        self.position = delta.position + len(delta.token_ids)
        if delta.finish is not None:
            self.finished_at = self.told_at = now

    def trim(self, below: int) -> None:
        """Forget what lies wholly below a position; never the finish."""
        while self.deltas and self.deltas[0].finish is None and _end(self.deltas[0]) <= below:
            self.deltas.popleft()

    def since(self, current: RequestEpoch, position: int) -> tuple[TokenDelta, ...]:
        """Everything from a position on; an empty delta, a sign of life, if there is nothing yet."""
        missing = tuple(d for d in self.deltas if _end(d) > position or d.finish is not None)
        return missing or (TokenDelta(current.request_id, current.epoch, self.position, []),)


class Outbox:
    """All epochs that a worker has not been told to forget."""

    def __init__(self) -> None:
        self._kept: dict[RequestEpoch, Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def open(self, request: RequestEpoch, frontend: str, position: int, *, held: bool = False) -> bool:
        """Begin to keep a new epoch. False if it is there already: a submission that came twice."""
        if request in self._kept:
            return False
        self._kept[request] = Kept(frontend, position, held=held)
        return True

    def get(self, request: RequestEpoch) -> Kept | None:
        return self._kept.get(request)

    def trim(self, acknowledged: Iterable[Progress]) -> None:
        """Forget what frontends have, of each of these epochs that is here."""
        for progress in acknowledged:
            if (kept := self._kept.get(RequestEpoch(progress.request_id, progress.epoch))) is not None:
                kept.trim(progress.position)

    def forget(self, requests: Iterable[RequestEpoch]) -> list[RequestEpoch]:
        """Drop these. Returns those of which the engine still has something: they are running, or held."""
        dropped = [(request, self._kept.pop(request, None)) for request in requests]
        return [request for request, kept in dropped if kept is not None and (kept.held or kept.finished_at is None)]

    def held(self) -> list[RequestEpoch]:
        """Epochs whose blocks somebody may still want to read."""
        return [request for request, kept in self._kept.items() if kept.held]

    def running(self) -> dict[RequestEpoch, str]:
        """Unfinished epochs, with their frontends."""
        return {request: kept.frontend for request, kept in self._kept.items() if kept.finished_at is None}

    def all(self) -> list[RequestEpoch]:
        return list(self._kept)

    def of_frontend(self, frontend: str) -> list[RequestEpoch]:
        return [request for request, kept in self._kept.items() if kept.frontend == frontend]

    def finished_before(self, time: float) -> list[RequestEpoch]:
        """Epochs whose end nobody has acknowledged since then."""
        return [
            request for request, kept in self._kept.items() if kept.finished_at is not None and kept.finished_at < time
        ]

    def tell_again(self, now: float, told_before: float, most: int) -> list[tuple[str, TokenDelta]]:
        """The last deltas of finished epochs whose frontends have not answered them, with these frontends: of those
        told before that time, `most` at most, the longest silent first. They count as told now."""
        due = [kept for kept in self._kept.values() if kept.finished_at is not None and kept.told_at < told_before]
        due = sorted(due, key=lambda kept: kept.told_at)[:most]
        for kept in due:
            kept.told_at = now
        return [(kept.frontend, kept.deltas[-1]) for kept in due]


def _end(delta: TokenDelta) -> int:
    return delta.position + len(delta.token_ids)
