"""A request's log and its epochs: the frontend's only truth about a request.

The log is the prompt and every token accepted so far. Each assignment to a worker has an epoch, minted here and
only here. Tokens count if they carry the current epoch and continue the log without a gap; what an old, slow or
half-dead worker still sends is fenced off by its epoch.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from dynamo_local.core.messages.tokens import Fault, TokenDelta
from dynamo_local.core.messages.work import RequestEpoch


class Verdict(enum.Enum):
    """What a delta means to the log."""

    ACCEPTED = "accepted"
    STALE = "stale"
    """Of another epoch than the current one, or of one whose worker was given up."""
    DUPLICATE = "duplicate"
    """Brings no position that the log lacks."""
    GAP = "gap"
    """Starts beyond the end of the log: something was lost on the way."""


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
        """The next output position wanted."""
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
        """The worker of `epoch` is lost or refuses: nothing that it sends counts any more.

        Returns its lease, or None if that epoch is over already, so that one loss, however often it is told, has
        one consequence.
        """
        if epoch != self.epoch:
            return None
        worker, self.worker = self.worker, None
        return worker

    def accept(self, delta: TokenDelta) -> tuple[Verdict, int]:
        """Judge a delta and, if it continues the log, take its tokens.

        Returns the verdict and how many leading tokens of the delta were already in the log (to be dropped by
        whoever passes the delta on). A finish without new tokens is accepted where the log ends, a failure
        anywhere; after either, nothing is accepted.
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
    """The delta without its first `known` tokens, and without what is told of a request's beginning."""
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
    """The end of a request that cannot go on, for its client."""
    return TokenDelta(log.request_id, log.epoch, log.position, [], finish="error", error=why, fault=fault)
