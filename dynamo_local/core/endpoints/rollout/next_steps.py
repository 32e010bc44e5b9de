"""What is done next for one endpoint: by what is ordered of it, and what is observed of its revisions. Pure.

A revision is launched (its model is had and checked, its files are written), then its workers start, then it is listed
on the board, where frontends prepare for it. As soon as a worker and all frontends are ready it takes the endpoint's
requests, and the revision before it is ended once its last request has finished. A revision that cannot answer is
ended, and the one before it is ordered again.

An endpoint that rests (core/endpoints/awake/idling.py) has parked workers or none. Its revision is launched and takes
requests all the same: frontends hold them until it is awake. An update of it is launched and checked, and takes over
without workers.

The caller shows the board first, carries out the steps in the background, and asks again when something has changed. A
revision with a step under way gets no other, except `End` and `BreakOff`, which break off what is under way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from dynamo_local.core.endpoints.rollout.observed import GIVEN_UP_AFTER, Ordered, Seen
from dynamo_local.core.endpoints.rollout.steps import (
    BreakOff,
    End,
    Forget,
    Launch,
    Park,
    Plan,
    Retire,
    Revert,
    Settle,
    Start,
    Step,
    Wake,
)

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
