"""The fleet as one process knows it: which processes are alive, and which may be given work. Pure.

Presences, revocations and the time are passed in. A process is identified by its lease. It is *routable* while its last
presence says "ready", that presence is not older than `ttl_s` allows, and its lease has not been revoked. A revoked
lease is never routable again; its process stays known until it falls silent, because it may still be working on its
requests. A parked worker is alive, and not routable. A worker that announces "failed" will bring no more tokens: it is
gone at once, and later presences are ignored.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from dynamo_local.core.beats import BEAT_S, QUIET_BEAT_S
from dynamo_local.core.messages.presence import Counts, Presence

TTL_S = 2.0
"""Silence after which a process counts as gone: four missed beats. With the expiry tick, under 3 s from SIGKILL."""

_QUIET_TTL_S = TTL_S + QUIET_BEAT_S - BEAT_S
"""The same for a quiet process: as long after the missed beat."""

AGGREGATED_ROLE = "aggregated"
"""Role of workers that serve whole requests, prompt and answer."""

DECODE_ROLE = "decode"
"""Role of workers that serve whole requests, and may have prompts prefilled by others."""

WORKER_ROLES = frozenset({AGGREGATED_ROLE, DECODE_ROLE})
"""Roles of workers to which the router assigns requests."""

PREFILL_ROLE = "prefill"
"""Role of workers that take jobs from the prefill queue."""

ENGINE_ROLES = WORKER_ROLES | {PREFILL_ROLE}
"""Roles of all workers: they have an engine, hold devices, and are scaled."""


FRONTEND_ROLE = "frontend"
"""Role of processes that take clients' requests."""

ROUTER_ROLE = "router"
"""Role of processes that assign requests to workers."""


class Happened(enum.Enum):
    """Kinds of change in the fleet."""

    APPEARED = "appeared"
    UPDATED = "updated"
    LEFT = "left"
    """The process is silent, and may be dead or only unheard; or it has failed (`Change.failed`)."""
    REVOKED = "revoked"
    """The process is given no more work. LEFT follows when it falls silent."""


@dataclass(frozen=True)
class Change:
    """A change, with the last presence of the process."""

    what: Happened
    presence: Presence

    @property
    def failed(self) -> bool:
        """Whether a worker has left because it announced that its engine had died or hung."""
        return self.what is Happened.LEFT and has_failed(self.presence)


def ttl_s(presence: Presence) -> float:
    """Silence after which a process with this last presence counts as gone, in seconds."""
    return _QUIET_TTL_S if presence.quiet else TTL_S


def has_failed(presence: Presence) -> bool:
    """Whether this is a worker whose engine has failed. (Other services that fail finish their work if they can.)"""
    return presence.state == "failed" and presence.role in ENGINE_ROLES


def in_flight_of(frontends: Iterable[Presence]) -> int | None:
    """Requests in flight that these frontends announce together. None if there are none, or one tells no number."""
    numbers = [None if presence.counts is None else presence.counts.in_flight for presence in frontends]
    known = [number for number in numbers if number is not None]
    return sum(known) if numbers and len(known) == len(numbers) else None


@dataclass
class _Member:
    presence: Presence
    heard_at: float

    @property
    def expires_at(self) -> float:
        return self.heard_at + ttl_s(self.presence)


class FleetView:
    """All processes of a namespace that this process has heard of."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._lease_of: dict[str, str] = {}
        """By watcher, of which one process at most is a member."""
        self._revoked: set[str] = set()

    def observe(self, presence: Presence, now: float) -> list[Change]:
        """Enter a presence. A new lease of a watcher means that its earlier process is gone."""
        if presence.lease in self._revoked and presence.lease not in self._members:
            return []
        changes = [] if presence.lease in self._revoked else self._supersede(presence)
        known = self._forget(presence.lease)
        if has_failed(presence):
            # Also for a worker that was not known: somebody may have given it a request.
            self._revoked.add(presence.lease)
            return [*changes, Change(Happened.LEFT, presence)]
        self._members[presence.lease] = _Member(presence, now)
        self._lease_of[presence.watcher] = presence.lease
        if presence.lease in self._revoked:
            return []
        if known is None:
            changes.append(Change(Happened.APPEARED, presence))
        elif known.presence != presence:
            changes.append(Change(Happened.UPDATED, presence))
        return changes

    def heard_again(self, lease: str, now: float) -> bool:
        """Note that a process has repeated its presence. False if the process is not known any more."""
        member = self._members.get(lease)
        if member is None:
            return False
        member.heard_at = now
        return True

    def revoke(self, lease: str) -> list[Change]:
        """Revoke a lease for good."""
        member = None if lease in self._revoked else self._members.get(lease)
        self._revoked.add(lease)
        return [] if member is None else [Change(Happened.REVOKED, member.presence)]

    def silent(self, now: float, within_s: float = 0.0) -> list[Presence]:
        """The processes that count as gone `within_s` from now if they stay silent; by default, those that do now."""
        return [m.presence for m in self._members.values() if now + within_s > m.expires_at]

    def expire(self, now: float, starved: Collection[str] = ()) -> list[Change]:
        """Remove processes that have been silent for too long, except those with a lease in `starved`."""
        gone = [presence for presence in self.silent(now) if presence.lease not in starved]
        for presence in gone:
            self._forget(presence.lease)
        return [Change(Happened.LEFT, presence) for presence in gone]

    def next_expiry(self) -> float:
        """Time at which the next process expires if it stays silent; infinite without processes."""
        return min((member.expires_at for member in self._members.values()), default=math.inf)

    def quiet(self) -> bool:
        """Whether all processes are quiet."""
        return all(member.presence.quiet for member in self._members.values())

    def excuse_silence(self, now: float, seconds: float = math.inf) -> None:
        """Shorten the silence of all processes by so many seconds, or to 0: this process could not hear them."""
        for member in self._members.values():
            member.heard_at = min(member.heard_at + seconds, now)

    def get(self, lease: str) -> Presence | None:
        member = self._members.get(lease)
        return None if member is None else member.presence

    def members(self) -> list[Presence]:
        """All processes, those with a revoked lease included, ordered by watcher."""
        return sorted((m.presence for m in self._members.values()), key=lambda p: (p.watcher, p.lease))

    def routable(self, roles: Iterable[str] = WORKER_ROLES) -> list[Presence]:
        """The processes in these roles that may be given requests, ordered by watcher."""
        return [p for p in self.ready(roles) if p.exclusive is None]

    def ready(self, roles: Iterable[str] = WORKER_ROLES) -> list[Presence]:
        """The routable processes, and those that are set apart for one request."""
        wanted = frozenset(roles)
        ready = [p for p in self.members() if p.state == "ready" and p.role in wanted]
        return [p for p in ready if p.lease not in self._revoked]

    def exclusive(self) -> list[Presence]:
        """Workers that are set apart for one request, and so not routable. Ordered by watcher."""
        return [p for p in self.members() if p.exclusive is not None]

    def parked(self) -> list[Presence]:
        """Workers that are parked: alive, and given no work until they are woken. Ordered by watcher."""
        return [p for p in self.members() if p.state == "parked" and p.lease not in self._revoked]

    def leaving(self) -> list[Presence]:
        """Processes that drain, or whose lease is revoked. Ordered by watcher."""
        return [p for p in self.members() if p.state == "draining" or p.lease in self._revoked]

    def _supersede(self, presence: Presence) -> list[Change]:
        lease = self._lease_of.get(presence.watcher, presence.lease)
        old = None if lease == presence.lease else self._forget(lease)
        if old is None:
            return []
        # A late presence of the old process must not displace the new one.
        self._revoked.add(lease)
        return [Change(Happened.LEFT, old.presence)]

    def _forget(self, lease: str) -> _Member | None:
        member = self._members.pop(lease, None)
        if member is not None:
            del self._lease_of[member.presence.watcher]
        return member


# Whether requests would still be answered without some workers: the one rule behind every `--force`. Pure.


def last_answering(roles: Mapping[str, str], leaving: Collection[str]) -> tuple[str, ...]:
    """The watchers that answer requests now, sorted, if all of them are `leaving`; none if others remain.

    `roles`: the role of each watcher that counts. Each caller decides which do: those that run, those that are ready,
    those that are about to be added. Where nobody answers requests to begin with, nothing is lost.
    """
    answering = {watcher for watcher, role in roles.items() if role in WORKER_ROLES}
    return tuple(sorted(answering)) if answering.issubset(leaving) else ()


# Circuit breakers: workers that keep failing requests are avoided for a while. Pure.
#
# Such workers are avoided, not ejected: routing takes them when there is no other worker, so that breakers never leave
# a graph without workers. Only failures of the worker count, not those of a request (its parameters, its client), nor
# refusals while draining. By default, 10 failures in 120 s open a breaker for 60 s, as gateways like Envoy do.


@dataclass(frozen=True)
class BreakerRule:
    """`failures` within `window_s` open the breaker for `open_s`."""

    failures: int = 10
    window_s: float = 120.0
    open_s: float = 60.0


class Breakers:
    """A breaker for each worker, by lease."""

    def __init__(self, rule: BreakerRule | None = None) -> None:
        self._rule = rule or BreakerRule()
        self._failures: dict[str, deque[float]] = {}
        self._open_until: dict[str, float] = {}

    def failure(self, worker: str, now: float) -> None:
        """Count a request that the worker has failed."""
        times = self._failures.setdefault(worker, deque(maxlen=self._rule.failures))
        times.append(now)
        if len(times) == self._rule.failures and now - times[0] <= self._rule.window_s:
            self._open_until[worker] = now + self._rule.open_s
            times.clear()

    def open(self, now: float) -> tuple[str, ...]:
        """The workers to avoid now, ordered by lease."""
        self._open_until = {worker: until for worker, until in self._open_until.items() if until > now}
        return tuple(sorted(self._open_until))

    def forget(self, worker: str) -> None:
        """Drop the breaker of a worker that is gone."""
        self._failures.pop(worker, None)
        self._open_until.pop(worker, None)


# What all routers have counted together. Pure.


@dataclass(frozen=True)
class RoutingCounts:
    """Requests that got a worker, and that got none; tokens of the contexts of the former, those of them that were
    expected to be cached, and those that were to be pulled."""

    assigned: int
    unassigned: int
    tokens: int
    predicted_tokens: int
    pull_tokens: int


def routers_of(members: Iterable[Presence]) -> list[tuple[Presence, Counts]]:
    """Return the routers among the members that have reported, with what they have counted."""
    return [
        (each, each.counts) for each in members if each.counts is not None and each.counts.routed_tokens is not None
    ]


def routing_of(members: Iterable[Presence]) -> RoutingCounts | None:
    """Return the sum of what the routers among the members have counted; None if none has reported."""
    counts = [counts for _, counts in routers_of(members)]
    if not counts:
        return None
    return RoutingCounts(
        assigned=sum(each.assigned or 0 for each in counts),
        unassigned=sum(each.unassigned or 0 for each in counts),
        tokens=sum(each.routed_tokens or 0 for each in counts),
        predicted_tokens=sum(each.predicted_tokens or 0 for each in counts),
        pull_tokens=sum(each.pull_tokens or 0 for each in counts),
    )
