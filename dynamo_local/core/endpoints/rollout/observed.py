"""What is ordered of an endpoint, and what is observed of its revisions. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dynamo_local.core.endpoints.awake.idling import Rest

GIVEN_UP_AFTER = 3
"""Starts that fail in a row, before a revision that has never answered counts as failed."""


UnderWay = Literal["", "launching", "starting", "parking", "waking", "retiring", "ending"]


@dataclass(frozen=True)
class Ordered:
    """What is ordered. `revision` is to answer; `previous` is gone back to if it cannot. Both are numbers.

    `workers` and `prefill_workers`: how many are wanted, none of an endpoint that is to be asleep. `replace`:
    `previous` ends before workers of `revision` start. `deleting`: everything is to end. `rest`: whether workers are to
    take requests, and `why` not, or not for long, in words. `waking`: it rested, and no worker is ready since.
    `wake_failed`: why it is not started for anybody now.
    """

    revision: int
    previous: int | None = None
    workers: int = 1
    prefill_workers: int = 0
    replace: bool = False
    deleting: bool = False
    rest: Rest = "awake"
    why: str = ""
    waking: bool = False
    wake_failed: str = ""


@dataclass(frozen=True)
class Workers:
    """The workers of one kind of a revision, as names of watchers, each in order of its index.

    `starting`: claimed and not ready, those included whose process is started again. `ending`: told to end. `dead`:
    their processes have ended again and again, or cannot be woken, and are not tried any more; they hold their devices
    until they are removed. `parked`: alive, with a paused engine; they hold their devices.
    """

    ready: tuple[str, ...] = ()
    starting: tuple[str, ...] = ()
    ending: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()
    parked: tuple[str, ...] = ()

    @property
    def present(self) -> int:
        """Number of workers that stay."""
        return len(self.ready) + len(self.starting) + len(self.parked)


@dataclass(frozen=True)
class Frontends:
    """The frontends that announce themselves in a revision. `in_flight`: requests that they have for it together, and
    `held` those of them that wait for a worker; None if one of them does not say. `failure`: why one of them cannot
    serve it. `missing`: further ones that are ready, and have not announced themselves in it. `silent`: those of the
    server that are not heard: they start, hang, or are dead."""

    ready: int = 0
    starting: int = 0
    draining: int = 0
    in_flight: int | None = 0
    failure: str = ""
    held: int | None = 0
    missing: int = 0
    silent: int = 0

    @property
    def are_heard(self) -> bool:
        """Whether a frontend that had a request for it would be known."""
        return self.ready > 0 and not self.missing and not self.silent

    @property
    def are_ready(self) -> bool:
        """Whether all frontends can take requests for the revision. One that drains it has all that it needs."""
        return self.ready + self.draining > 0 and not self.starting and not self.missing

    @property
    def are_done(self) -> bool:
        """Whether no frontend has, or takes, a request for the revision."""
        return not self.ready and not self.starting and (not self.draining or self.in_flight == 0)


@dataclass(frozen=True)
class Seen:
    """What is observed of a revision.

    `launched`: its files are written, and workers can be started. `room`: number of further workers for which devices
    are free. `failures`: starts that have failed in a row, with `error` as the last reason. `is_hopeless`: no further
    attempt can help (`error` says why). `may_start`: False while a failed start is not to be repeated yet, and
    `may_park` while workers are not to be asked again that have refused to park.
    `waits_for_frontends`: those that are not ready for it have still time to be so.
    `took_requests`: it took requests at some time, and may still have some. `drain_is_over`: these have had the time to
    finish. `doing` and `shortage`: what is under way for it, and which devices it lacks, in words. `not_woken`: why its
    parked workers must stay so for now, in words.
    """

    launched: bool = False
    under_way: UnderWay = ""
    workers: Workers = Workers()
    prefill: Workers = Workers()
    frontends: Frontends = Frontends()
    waits_for_frontends: bool = True
    room: int = 0
    failures: int = 0
    error: str = ""
    is_hopeless: bool = False
    may_start: bool = True
    may_park: bool = True
    took_requests: bool = False
    drain_is_over: bool = False
    doing: str = ""
    shortage: str = ""
    not_woken: str = ""

    @property
    def has_failed(self) -> bool:
        """Whether it is not tried any more."""
        return self.is_hopeless or self.failures >= GIVEN_UP_AFTER

    @property
    def has_workers(self) -> bool:
        """Whether a process of it may exist."""
        return any(kind.present or kind.ending or kind.dead for kind in (self.workers, self.prefill))

    @property
    def is_gone(self) -> bool:
        """Whether nothing is left of it but its place on the board."""
        return not self.launched and not self.has_workers and not self.under_way
