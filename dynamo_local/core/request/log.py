"""A request's log and its epochs: the only truth about a request, kept by its frontend. Pure.

The log is the prompt and every token accepted so far. Each assignment to a worker has an epoch, which only the log
mints. Tokens are accepted if they carry the current epoch and continue the log without a gap. So tokens that a worker
still sends after the request was taken from it are never accepted.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from dynamo_local.core.messages.tokens import Fault, TokenDelta
from dynamo_local.core.messages.work import RequestEpoch


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
