"""The fleet: who is there, who may be given work. Pure; fed with presences, revocations and the time.

A process is known by its lease. It is *routable* while its last word was "ready", that word is not older than
`ttl_s` of it, and its lease has not been revoked. A revoked lease is never routable again; its process stays known
until it falls silent, because it may still be working on what it was given. A worker that says "failed" brings no
token any more: it is gone with that word, and whatever it says afterwards is ignored.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from dynamo_local.core.beats import BEAT_S, QUIET_BEAT_S
from dynamo_local.core.messages.presence import Presence

TTL_S = 2.0
"""Silence after which a process counts as gone: four missed beats. With the expiry tick, under 3 s from SIGKILL."""

_QUIET_TTL_S = TTL_S + QUIET_BEAT_S - BEAT_S
"""The same of a process that said that it speaks less often: as long after the beat that is missed."""

WORKER_ROLES = frozenset({"aggregated", "decode"})
"""Roles that take requests from the router."""

PREFILL_ROLE = "prefill"
"""The role that takes its requests from the prefill queue."""

ENGINE_ROLES = WORKER_ROLES | {PREFILL_ROLE}
"""Roles of workers: what has an engine, holds devices, and is scaled."""


class Happened(enum.Enum):
    """What changed about a process."""

    APPEARED = "appeared"
    UPDATED = "updated"
    LEFT = "left"
    """Gone silent: it may be dead, or only unheard. Or it has failed: `Change.failed`."""
    REVOKED = "revoked"
    """No longer to be given work. LEFT follows when it falls silent."""


@dataclass(frozen=True)
class Change:
    """`presence` is the last word of the process."""

    what: Happened
    presence: Presence

    @property
    def failed(self) -> bool:
        """Whether a worker has left because its engine died or hangs, as far as it could tell so."""
        return self.what is Happened.LEFT and has_failed(self.presence)


def ttl_s(presence: Presence) -> float:
    """Silence after which the process of this last word counts as gone."""
    return _QUIET_TTL_S if presence.quiet else TTL_S


def has_failed(presence: Presence) -> bool:
    """Whether this is a worker whose engine does nothing any more. (Other services that fail finish what they can.)"""
    return presence.state == "failed" and presence.role in ENGINE_ROLES


@dataclass
class _Member:
    presence: Presence
    heard_at: float

    @property
    def expires_at(self) -> float:
        return self.heard_at + ttl_s(self.presence)


class FleetView:
    """All processes of a namespace, as far as this process has heard."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._revoked: set[str] = set()

    def observe(self, presence: Presence, now: float) -> list[Change]:
        """Take a presence in. A new lease for a watcher means that its earlier incarnation is gone."""
        if presence.lease in self._revoked and presence.lease not in self._members:
            return []
        changes = [] if presence.lease in self._revoked else self._supersede(presence)
        known = self._members.pop(presence.lease, None)
        if has_failed(presence):
            # Also for those who have not heard of it before: somebody may have given it a request.
            self._revoked.add(presence.lease)
            return [*changes, Change(Happened.LEFT, presence)]
        self._members[presence.lease] = _Member(presence, now)
        if presence.lease in self._revoked:
            return []
        if known is None:
            changes.append(Change(Happened.APPEARED, presence))
        elif known.presence != presence:
            changes.append(Change(Happened.UPDATED, presence))
        return changes

    def heard_again(self, lease: str, now: float) -> bool:
        """Note that a process said what it said last. False if it is not known, or not any more."""
        member = self._members.get(lease)
        if member is None:
            return False
        member.heard_at = now
        return True

    def revoke(self, lease: str) -> list[Change]:
        """Void a lease, for good."""
        member = None if lease in self._revoked else self._members.get(lease)
        self._revoked.add(lease)
        return [] if member is None else [Change(Happened.REVOKED, member.presence)]

    def silent(self, now: float, within_s: float = 0.0) -> list[Presence]:
        """Return the presences that count as gone within so many seconds if they say nothing more; by default, those
        that do now."""
        return [m.presence for m in self._members.values() if now + within_s > m.expires_at]

    def expire(self, now: float, starved: Collection[str] = ()) -> list[Change]:
        """Forget those that have been silent for too long, but for `starved` leases: they could not speak."""
        gone = [presence for presence in self.silent(now) if presence.lease not in starved]
        for presence in gone:
            del self._members[presence.lease]
        return [Change(Happened.LEFT, presence) for presence in gone]

    def next_expiry(self) -> float:
        """When the one who has been silent longest is to be forgotten, if it stays so; infinite if nobody is there."""
        return min((member.expires_at for member in self._members.values()), default=math.inf)

    def quiet(self) -> bool:
        """Whether all who are there speak less often."""
        return all(member.presence.quiet for member in self._members.values())

    def excuse_silence(self, now: float, seconds: float = math.inf) -> None:
        """Take so much off everybody's silence (all of it by default): it was this process's own deafness."""
        for member in self._members.values():
            member.heard_at = min(member.heard_at + seconds, now)

    def get(self, lease: str) -> Presence | None:
        member = self._members.get(lease)
        return None if member is None else member.presence

    def members(self) -> list[Presence]:
        """Everybody, those with a revoked lease included, ordered by watcher."""
        return sorted((m.presence for m in self._members.values()), key=lambda p: (p.watcher, p.lease))

    def routable(self, roles: Iterable[str] = WORKER_ROLES) -> list[Presence]:
        """Those who may be given requests, ordered by watcher."""
        return [p for p in self.ready(roles) if p.exclusive is None]

    def ready(self, roles: Iterable[str] = WORKER_ROLES) -> list[Presence]:
        """The same, and those that are set apart for one request."""
        wanted = frozenset(roles)
        ready = [p for p in self.members() if p.state == "ready" and p.role in wanted]
        return [p for p in ready if p.lease not in self._revoked]

    def exclusive(self) -> list[Presence]:
        """Workers that are set apart for one request, which are ready and not routable. Ordered by watcher."""
        return [p for p in self.members() if p.exclusive is not None]

    def leaving(self) -> list[Presence]:
        """Those that are there and about to go: they drain, or their lease is revoked. Ordered by watcher."""
        return [p for p in self.members() if p.state == "draining" or p.lease in self._revoked]

    def _supersede(self, presence: Presence) -> list[Change]:
        old = [
            m.presence
            for m in self._members.values()
            if m.presence.watcher == presence.watcher and m.presence.lease != presence.lease
        ]
        for gone in old:
            del self._members[gone.lease]
            # A word of the dead may still be under way; it must not displace the living.
            self._revoked.add(gone.lease)
        return [Change(Happened.LEFT, gone) for gone in old]
