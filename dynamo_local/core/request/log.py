"""A request's log and its epochs: the only truth about a request, kept by its frontend. Pure.

The log is the prompt and every token accepted so far. Each assignment to a worker has an epoch, which only the log
mints. Tokens are accepted if they carry the current epoch and continue the log without a gap. So tokens that a worker
still sends after the request was taken from it are never accepted.
"""

from __future__ import annotations

import enum
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from dynamo_local.core.messages.work import Fault, Progress, RequestEpoch, TokenDelta


class Verdict(enum.Enum):
    """The log's judgement on a delta."""

    ACCEPTED = "accepted"
    STALE = "stale"
    """The delta is not of the current epoch, or that epoch's worker was given up."""
    DUPLICATE = "duplicate"
    """The log has all positions of the delta."""
    GAP = "gap"
    """The delta starts beyond the end of the log: a message was lost."""


@dataclass
class RequestLog:
    """The log of one unfinished request. Invariant: `tokens[i]` was accepted exactly once, in order."""

    request_id: str
    prompt_token_ids: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    epoch: int = 0
    """0: not assigned yet."""
    worker: str | None = None
    """Lease of the worker that holds the current epoch."""
    finished: bool = False

    @property
    def position(self) -> int:
        """The next output position that the log lacks."""
        return len(self.tokens)

    @property
    def current(self) -> RequestEpoch:
        return RequestEpoch(self.request_id, self.epoch)

    def assign(self, worker: str) -> RequestEpoch:
        """Mint the next epoch for `worker`. From now on, only its tokens count."""
        self.epoch += 1
        self.worker = worker
        return self.current

    def give_up(self, epoch: int) -> str | None:
        """End `epoch`, whose worker is lost or refuses the request: nothing that it sends is accepted any more.

        Return the worker's lease, or None if that epoch has ended already. So one loss has one consequence, however
        often it is reported.
        """
        if epoch != self.epoch:
            return None
        worker, self.worker = self.worker, None
        return worker

    def accept(self, delta: TokenDelta) -> tuple[Verdict, int]:
        """Judge a delta and, if it continues the log, append its tokens.

        Return the verdict, and how many leading tokens of the delta the log had already; the caller drops these before
        it passes the delta on. A finish without new tokens is accepted where the log ends, a failure anywhere; after
        either, nothing is accepted.
        """
        if delta.epoch != self.epoch or self.worker is None:
            return Verdict.STALE, 0
        if self.finished:
            return Verdict.DUPLICATE, 0
        if delta.finish == "error":
            self.finished = True
            return Verdict.ACCEPTED, len(delta.token_ids)
        known = self.position - delta.position
        if known < 0:
            return Verdict.GAP, 0
        fresh = delta.token_ids[known:]
        if not fresh and not (delta.finish is not None and known <= len(delta.token_ids)):
            return Verdict.DUPLICATE, 0
        self.tokens.extend(fresh)
        self.finished = delta.finish is not None
        return Verdict.ACCEPTED, known


def continuation(delta: TokenDelta, known: int) -> TokenDelta:
    """Return the delta without its first `known` tokens, and without what belongs to the beginning of the output."""
    logprobs = None if delta.logprobs is None else delta.logprobs.without_first(known)
    return msgspec.structs.replace(
        delta,
        position=delta.position + known,
        token_ids=delta.token_ids[known:],
        logprobs=logprobs,
        prompt_logprobs=None,
        cached_tokens=None,
        created_tokens=0,
        events=(),
    )


def failure(log: RequestLog, why: str, fault: Fault | None = None) -> TokenDelta:
    """Return the last delta of a request that fails, with the error for its client."""
    return TokenDelta(log.request_id, log.epoch, log.position, [], finish="error", error=why, fault=fault)


_ID = re.compile(r"(?:\d+_)?(?P<told>cmpl-.*(?=-\d+-)|(?!cmpl-).*)(?:-\d+)?-[0-9a-f]{8}")
"""A request id as vLLM's OpenAI server makes it. `told` is the part that the client knows; each choice and each prompt
of a client's request has an id of its own."""


def told_id(request_id: str) -> str:
    """The part of a request id that the client knows."""
    match = _ID.fullmatch(request_id)
    return request_id if match is None else match["told"]


# The tokens that a worker keeps of its live requests, so that lost messages can be sent again. Pure.
#
# The bus may lose messages when a connection breaks. A worker therefore keeps the tokens of a request until its
# frontend has acknowledged them, and the last ones until the frontend cancels the request.


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
