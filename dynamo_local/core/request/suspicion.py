"""Finds requests that end engines. Pure.

An engine that dies leaves all requests that it worked on under suspicion, as any of them may be the cause. Each goes on
elsewhere, from its log. Under most of them no second engine dies. A request under which a second one does is *suspect*:
it is tried alone, on a worker that is set apart for it, and waits until there is one.

- *If an engine dies while the request is tried*, the request is guilty, and fails.
- *The request is cleared* when it has brought `CLEARING_TOKENS` in its trial, and goes on in company. A request that
  ends engines ends the next one about where it ended the last: it goes on from its log, which lacks only the tokens
  that were on their way. So a guilty request ends its trial at once, and an innocent one delays the others for few
  tokens only. To stay alone to the end would be safer, and worse for all others: an engine has many requests, and those
  that were twice beside a guilty one would be computed one after the other.
- *Deaths are not forgotten.* They are counted for as long as the request lives, whatever tokens come between. A cleared
  request is suspect again after one more, and this time stays alone until it ends.

So a request that ends engines within CLEARING_TOKENS of having been placed ends three engines; one that takes longer
ends four; no request ends more. And only a request that was alone with a dying engine fails: however often an innocent
request is beside a guilty one, it finishes.

Other causes of an engine's death (a device, a kill) are not known here: a request that meets this three times, the last
time alone, is taken for guilty. Only the death of an engine counts, as its worker reports it. A worker that falls
silent as a whole, because it was killed or the machine is busy, says nothing about its requests.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from dynamo_local.core.messages.presence import Presence

COMPANY_DEATHS = 2
"""Number of engines that die under a request in company until it is suspect."""

CLEARING_TOKENS = 16
"""Number of tokens that clear a suspect: more than are on their way when an engine dies."""


@dataclass(frozen=True)
class Standing:
    """The suspicion against one request."""

    deaths: int = 0
    """Number of engines that have died while they worked on the request."""
    suspect: bool = False
    cleared: bool = False
    """The request was suspect once, and passed its trial."""
    guilty: bool = False

    def after_death(self) -> Standing:
        """Return the standing after the death of an engine that worked on the request; on nothing else, if it is
        suspect."""
        deaths = self.deaths + 1
        return replace(self, deaths=deaths, guilty=self.suspect, suspect=deaths >= COMPANY_DEATHS)

    def after_tokens(self, tokens: int) -> Standing:
        """Return the standing after so many tokens of the current epoch."""
        if self.suspect and not self.cleared and not self.guilty and tokens >= CLEARING_TOKENS:
            return replace(self, suspect=False, cleared=True)
        return self

    @property
    def suspicion(self) -> str:
        """Why the request is suspect, in words."""
        return f"{self.deaths} engines died while they worked on it and on others"

    @property
    def guilt(self) -> str:
        """The error for the client of a guilty request."""
        return f"{self.deaths} engines died while they worked on this request, the last one on nothing else"


@dataclass(frozen=True)
class Begin:
    """Begin the trial: the worker is free, and takes no request but the suspect."""

    worker: str


@dataclass(frozen=True)
class Ask:
    """Ask the worker to be set apart for the suspect, or to stay so."""

    worker: str


def next_step(
    request_id: str, frontend: str, workers: Sequence[Presence], asked: str | None, avoid: Collection[str] = ()
) -> Begin | Ask | None:
    """Return the next step towards a trial of a suspect; None: wait.

    `workers` are the ready ones. `asked` is the worker that was asked last: no other is asked while it is there. A
    worker that is set apart for another frontend's request is not asked. (A trial of the same frontend has ended: a
    frontend tries one request at a time.)
    """
    own = [worker for worker in workers if _is_for(worker, request_id, frontend)]
    if own:
        exclusive = own[0].exclusive
        assert exclusive is not None, "only workers that are set apart were chosen"
        return Begin(own[0].lease) if exclusive.free else Ask(own[0].lease)
    free = [worker for worker in workers if worker.exclusive is None or worker.exclusive.frontend == frontend]
    if any(worker.lease == asked for worker in free):
        assert asked is not None, "no worker has the lease None"
        return Ask(asked)
    best = min(free, key=lambda worker: (worker.lease in avoid, _requests(worker), worker.watcher), default=None)
    return None if best is None else Ask(best.lease)


def _is_for(worker: Presence, request_id: str, frontend: str) -> bool:
    exclusive = worker.exclusive
    return exclusive is not None and (exclusive.request_id, exclusive.frontend) == (request_id, frontend)


def _requests(worker: Presence) -> float:
    """Return how many requests would have to leave the worker; infinite if its load is unknown."""
    load = worker.load
    if load is None or load.running is None or load.waiting is None:
        return math.inf
    return load.running + load.waiting
