"""Requests under which engines die. Pure.

An engine that dies takes the blame to all requests that it worked on, as nobody can tell which of them it was. Each
goes on elsewhere, from its log. Under most of them no second engine dies. One under which a second one does is
*suspect*: it is tried alone, on a worker that is set apart for it, and waits until there is one.

- *If an engine dies while it is tried*, the request is guilty, and fails.
- *It is cleared* when it has brought `CLEARING_TOKENS` under its trial, and goes on in company. A request that ends
  engines ends the next one about where it ended the last: it goes on from its log, which lacks no more than the tokens
  that were on their way. So a guilty one ends its trial at once, and an innocent one holds up the others for few tokens
  only. To stay alone to the end would be safer, and worse for all others: an engine has many requests, and those that
  were twice beside a guilty one would be computed one after the other.
- *Cleared is not forgotten.* Deaths are counted for as long as the request lives, whatever tokens come between. Under
  one more it is suspect again, and this time stays alone until it ends.

So of a request that ends engines within CLEARING_TOKENS of having been taken up, three engines die; of one that takes
longer, four; of no request more. And only who was alone with a dying engine fails: however often an innocent request is
beside a guilty one, it finishes.

That engines die for other reasons (a device, a kill) is not known here: a request that meets this three times, the last
time alone, is taken for guilty. Only the death of an engine counts, as its worker tells it. A worker that falls silent
as a whole, because it was killed or the machine is busy, says nothing about its requests.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from dynamo_local.core.messages.presence import Presence

COMPANY_DEATHS = 2
"""Engines that may die under a request in company, before it is suspect."""

CLEARING_TOKENS = 16
"""More than are on their way when an engine dies."""


@dataclass(frozen=True)
class Standing:
    """What there is to be said about a request."""

    deaths: int = 0
    """Engines that have died while they worked on it."""
    suspect: bool = False
    cleared: bool = False
    """The request was suspect once, and passed its trial."""
    guilty: bool = False

    def after_death(self) -> Standing:
        """An engine has died that worked on it; if it is suspect, on nothing else."""
        deaths = self.deaths + 1
        return replace(self, deaths=deaths, guilty=self.suspect, suspect=deaths >= COMPANY_DEATHS)

    def after_tokens(self, tokens: int) -> Standing:
        """So many have come since it was last taken up."""
        if self.suspect and not self.cleared and not self.guilty and tokens >= CLEARING_TOKENS:
            return replace(self, suspect=False, cleared=True)
        return self

    @property
    def suspicion(self) -> str:
        return f"{self.deaths} engines died while they worked on it and on others"

    @property
    def charge(self) -> str:
        """What its client is told if it is guilty."""
        return f"{self.deaths} engines died while they worked on this request, the last one on nothing else"


@dataclass(frozen=True)
class Begin:
    """The worker is free, and takes nothing but the suspect."""

    worker: str


@dataclass(frozen=True)
class Ask:
    """The worker is to be set apart, or to stay so."""

    worker: str


def next_step(
    request_id: str, frontend: str, workers: Sequence[Presence], asked: str | None, avoid: Collection[str] = ()
) -> Begin | Ask | None:
    """How to come by a worker for a suspect; None: wait.

    `workers` are ready, `asked` is the one that was asked last: nobody else is asked while that one is there. Nobody is
    asked who is set apart for another frontend's request. (One of the same frontend is over: it tries one at a time.)
    """
    own = [worker for worker in workers if _is_for(worker, request_id, frontend)]
    if own:
        exclusive = own[0].exclusive
        assert exclusive is not None, "that is what they were chosen by"
        return Begin(own[0].lease) if exclusive.free else Ask(own[0].lease)
    free = [worker for worker in workers if worker.exclusive is None or worker.exclusive.frontend == frontend]
    if any(worker.lease == asked for worker in free):
        assert asked is not None, "a lease is no None"
        return Ask(asked)
    best = min(free, key=lambda worker: (worker.lease in avoid, _requests(worker), worker.watcher), default=None)
    return None if best is None else Ask(best.lease)


def _is_for(worker: Presence, request_id: str, frontend: str) -> bool:
    exclusive = worker.exclusive
    return exclusive is not None and (exclusive.request_id, exclusive.frontend) == (request_id, frontend)


def _requests(worker: Presence) -> float:
    """Return how many requests would have to leave the worker; infinite if it has not told."""
    load = worker.load
    if load is None or load.running is None or load.waiting is None:
        return math.inf
    return load.running + load.waiting
