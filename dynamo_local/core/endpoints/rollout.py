"""What is ordered of an endpoint, and what is observed of its revisions. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from dynamo_local.core.endpoints.idling import Rest

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


# The steps by which an endpoint comes to what is ordered of it. Pure.


@dataclass(frozen=True)
class Launch:
    """Get and check the model of the revision, and write its files."""

    revision: int


@dataclass(frozen=True)
class Start:
    """Start so many workers of the revision, side by side."""

    revision: int
    workers: int
    prefill_workers: int = 0


@dataclass(frozen=True)
class Park:
    """Park these workers of the revision, side by side."""

    revision: int
    watchers: tuple[str, ...]


@dataclass(frozen=True)
class Wake:
    """Have these parked workers of the revision take requests again, side by side."""

    revision: int
    watchers: tuple[str, ...]


@dataclass(frozen=True)
class BreakOff:
    """Break off the start under way: end the workers of the revision that are starting."""

    revision: int


@dataclass(frozen=True)
class Retire:
    """End these workers of the revision in order."""

    revision: int
    watchers: tuple[str, ...]


@dataclass(frozen=True)
class End:
    """End all workers of the revision, starting ones included, and remove its files."""

    revision: int


@dataclass(frozen=True)
class Settle:
    """Forget the previous revision: there is no going back to it."""


@dataclass(frozen=True)
class Revert:
    """Order the previous revision again."""

    why: str


@dataclass(frozen=True)
class Forget:
    """Remove the endpoint: nothing is left of it."""


RevisionStep = Launch | Start | Park | Wake | BreakOff | Retire | End
"""Steps that a revision carries out by itself, in the background."""


Step = RevisionStep | Settle | Revert | Forget


@dataclass(frozen=True)
class Plan:
    """Steps to begin now, and what the board is to list: all these revisions, of which `takes` takes new requests."""

    steps: tuple[Step, ...] = ()
    listed: tuple[int, ...] = ()
    takes: int | None = None


# What is done next for one endpoint: by what is ordered of it, and what is observed of its revisions. Pure.

_BACK_OFF_S = (0.0, 1.0, 5.0)
_ANSWERING_BACK_OFF_S = 60.0


def next_steps(ordered: Ordered, seen: Mapping[int, Seen], takes: int | None) -> Plan:
    """Plan for an endpoint. `takes`: the revision that takes requests by the present board."""
    listed = tuple(number for number in sorted(seen) if seen[number].launched)
    if ordered.deleting:
        return Plan(tuple(_deletion(seen)), listed, None)
    takes = _taking(ordered, seen, takes)
    if takes == ordered.revision and ordered.previous is not None:
        return Plan((Settle(),), listed, takes)
    current = seen.get(ordered.revision, Seen())
    if ordered.previous is not None and current.has_failed:
        return Plan((Revert(current.error),), listed, takes)
    kept = {ordered.revision, ordered.previous, takes}
    # A frontend that is not heard at all may still have requests.
    heard = current.frontends.are_heard
    old = (step for number in sorted(seen.keys() - kept) for step in _ended(number, seen[number], heard=heard))
    steps = (*old, *_brought_up(ordered, seen, takes))
    return Plan((*_woken(ordered, seen, steps), *steps), listed, takes)


def can_answer(ordered: Ordered, seen: Seen) -> bool:
    """Whether the revision can take the endpoint's requests: with a worker, unless none is wanted. A parked one is
    woken for them."""
    has_worker = bool(seen.workers.ready or seen.workers.parked) or ordered.workers == 0
    frontends = seen.frontends
    has_frontends = frontends.are_ready or (frontends.ready > 0 and not seen.waits_for_frontends)
    return seen.launched and has_worker and has_frontends and seen.under_way != "ending"


def back_off_s(failures: int, *, answers: bool) -> float:
    """Time until a start is repeated that has failed so many times in a row. `answers`: the revision takes requests."""
    if failures >= GIVEN_UP_AFTER and answers:
        return _ANSWERING_BACK_OFF_S
    return _BACK_OFF_S[min(failures, len(_BACK_OFF_S) - 1)]


def _taking(ordered: Ordered, seen: Mapping[int, Seen], takes: int | None) -> int | None:
    """The revision that is to take requests."""
    current = seen.get(ordered.revision, Seen())
    if current.launched and (takes == ordered.revision or can_answer(ordered, current)):
        return ordered.revision
    if ordered.previous is not None and ordered.replace and current.launched and not current.has_failed:
        return None
    if takes is None and ordered.previous is not None and can_answer(ordered, seen.get(ordered.previous, Seen())):
        # It was to be replaced, and is not any more.
        return ordered.previous
    return takes if takes in seen and takes != ordered.revision else None


def _deletion(seen: Mapping[int, Seen]) -> Iterator[Step]:
    for number in sorted(seen):
        yield from _ended(number, seen[number])
    if all(one.is_gone for one in seen.values()):
        yield Forget()


def _ended(number: int, seen: Seen, *, heard: bool = True) -> Iterator[Step]:
    """The end of a revision that takes no requests any more: once those that it has are finished.

    `heard`: whether a frontend without requests for it would be known.
    """
    if seen.is_gone or seen.under_way == "ending":
        return
    is_done = seen.frontends.are_done and (heard or seen.frontends.draining > 0)
    # Without a worker, not even one that is started again, nothing would finish.
    if not seen.took_requests or not seen.workers.present or is_done or seen.drain_is_over:
        yield End(number)


def _woken(ordered: Ordered, seen: Mapping[int, Seen], others: Collection[Step]) -> Iterator[Step]:
    """The wake of parked workers, those included of a revision that is only to finish its requests. `others`: steps
    that are taken anyway."""
    busy = {getattr(step, "revision", None) for step in others}
    for number, one in sorted(seen.items()):
        parked = (*one.workers.parked, *one.prefill.parked)
        if ordered.rest == "awake" and parked and number not in busy and not one.under_way and one.may_start:
            yield Wake(number, parked)


def _parked(ordered: Ordered, current: Seen) -> Iterator[Step]:
    ready = (*current.workers.ready, *current.prefill.ready)
    if ordered.rest == "parked" and ready and current.may_park:
        yield Park(ordered.revision, ready)


def _brought_up(ordered: Ordered, seen: Mapping[int, Seen], takes: int | None) -> Iterator[Step]:
    """Steps towards what is ordered of the current revision."""
    current = seen.get(ordered.revision, Seen())
    previous = seen.get(ordered.previous, Seen()) if ordered.previous is not None else Seen()
    if current.has_failed and takes != ordered.revision:
        yield from () if current.is_gone or current.under_way == "ending" else (End(ordered.revision),)
    elif ordered.replace and ordered.previous is not None and current.launched and not previous.is_gone:
        yield from _ended(ordered.previous, previous)
    elif dead := _dead(seen, {ordered.revision, ordered.previous}):
        yield dead
    elif current.under_way == "starting" and ordered.rest == "asleep":
        yield BreakOff(ordered.revision)
    elif current.under_way:
        return
    elif not current.launched:
        yield from (Launch(ordered.revision),) if current.may_start else ()
    elif ordered.rest == "awake" and (current.workers.parked or current.prefill.parked):
        # They are woken, or will be: what is too much of them ends later.
        return
    elif surplus := _surplus(current, ordered):
        yield Retire(ordered.revision, surplus)
    elif starts := tuple(_started(ordered, current, previous)):
        yield from starts
    else:
        yield from _parked(ordered, current)


def _started(ordered: Ordered, current: Seen, previous: Seen) -> Iterator[Step]:
    """Starts of the workers that lack, as far as there are devices."""
    lacking = max(0, ordered.workers - current.workers.present)
    lacking_prefill = max(0, ordered.prefill_workers - current.prefill.present)
    if not current.may_start or not lacking + lacking_prefill or ordered.rest != "awake":
        return
    workers = min(lacking, current.room)
    prefill = min(lacking_prefill, current.room - workers)
    if workers + prefill:
        yield Start(ordered.revision, workers, prefill)
    elif not current.has_workers and not previous.under_way and len(previous.workers.ready) > 1:
        # The device for the first worker comes from the previous revision, which goes on with the rest.
        yield Retire(ordered.previous or 0, previous.workers.ready[-1:])


def _dead(seen: Mapping[int, Seen], numbers: Collection[int | None]) -> Retire | None:
    """The removal of workers that are dead, of one of these revisions."""
    for number, one in seen.items():
        watchers = (*one.workers.dead, *one.prefill.dead)
        if number in numbers and watchers and not one.under_way:
            return Retire(number, watchers)
    return None


def _surplus(current: Seen, ordered: Ordered) -> tuple[str, ...]:
    """Workers that are too many: those that are not ready first, then those of the highest index."""
    found: list[str] = []
    for kind, wanted in ((current.workers, ordered.workers), (current.prefill, ordered.prefill_workers)):
        surplus = max(0, kind.present - wanted)
        found += (*reversed(kind.starting), *reversed(kind.parked), *reversed(kind.ready))[:surplus]
    return tuple(found)
