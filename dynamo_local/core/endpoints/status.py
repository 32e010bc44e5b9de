"""The state of an endpoint with its reason, as its owner is shown it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from msgspec.structs import replace

from dynamo_local.core.endpoints.idling import AT_START
from dynamo_local.core.endpoints.rollout import Ordered, Seen
from dynamo_local.core.messages.endpoints import Board, BoardRevision, EndpointHistory, EndpointState, EndpointStatus
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.names import parse_revision

# What a frontend does for each revision on the board. Pure.


class Standing(Enum):
    """What a frontend does for a revision."""

    PREPARES = "prepares"
    """The frontend builds its part of it, and gives it no request."""
    TAKES = "takes"
    """New requests go to the revision."""
    ENDS = "ends"
    """Requests under way finish, and no new ones come."""


def standings(board: Board, took: frozenset[str] = frozenset()) -> dict[str, Standing]:
    """Return the standing of each revision on the board.

    `took`: revisions that have taken requests before, as this frontend knows. One that takes none any more ends; so
    does one that a newer revision has taken over from, and that of an endpoint that is being deleted, for a frontend
    that was restarted meanwhile.
    """
    newest: dict[str, int] = {}
    for each in board.revisions:
        if each.takes_requests:
            revision = parse_revision(each.revision)
            newest[revision.endpoint] = max(newest.get(revision.endpoint, 0), revision.number)
    deleted = {view.spec.name for view in board.endpoints if view.status.state == "deleting"}
    return {each.revision: _standing(each, took, newest, deleted) for each in board.revisions}


def _standing(each: BoardRevision, took: frozenset[str], newest: dict[str, int], deleted: set[str]) -> Standing:
    if each.takes_requests:
        return Standing.TAKES
    revision = parse_revision(each.revision)
    over = each.revision in took or revision.endpoint in deleted
    return Standing.ENDS if over or revision.number < newest.get(revision.endpoint, 0) else Standing.PREPARES


def is_coming(status: EndpointStatus) -> bool:
    """Whether an endpoint that takes no requests now is to take some without its owner's order: as it is, or because
    somebody asks for it."""
    return status.state not in ("failed", "deleting")


# What has become of an endpoint since the server started: how often it was parked, woken and so on. Pure.

CHANGES = frozenset({"park", "sleep", "wake", "swap"})
"""Kinds of events of endpoints that are counted."""


def noted(history: EndpointHistory, event: Event) -> EndpointHistory:
    """Add a dated event of the endpoint. A wake counts when it begins, a swap once the other endpoint is ready."""
    if event.kind not in CHANGES or event.cause == AT_START:
        return history
    last = event.what if not event.why else f"{event.what}: {event.why}"
    history = replace(history, last=last, last_at=event.time)
    match event.kind:
        case "park":
            return replace(history, parks=_one_more(history.parks, event.cause))
        case "sleep":
            return replace(history, sleeps=_one_more(history.sleeps, event.cause))
        case "wake" if event.took_s is None:
            return replace(history, wakes=_one_more(history.wakes, event.cause))
        case "swap" if event.took_s is not None:
            return replace(history, swaps=history.swaps + 1)
    return history


def _one_more(counts: Mapping[str, int], cause: str) -> dict[str, int]:
    return {**counts, cause: counts.get(cause, 0) + 1}


def status_of(ordered: Ordered, seen: Mapping[int, Seen], takes: int | None, note: str = "") -> EndpointStatus:
    """The status of an endpoint with workers of its own. `takes`: the revision that takes requests.

    `note`: what went wrong with an update last, which is shown while nothing else is to be said.
    """
    answering = seen.get(ordered.revision if takes is None else takes, Seen())
    state, reason = _state(ordered, seen, takes)
    shown = (answering.workers, answering.prefill)
    return EndpointStatus(
        state,
        reason or note,
        ordered.revision if takes is None else takes,
        ordered.workers,
        *(len(shown[0].ready), len(shown[0].starting)),
        ordered.prefill_workers,
        len(shown[1].ready),
        len(shown[0].parked),
    )


def status_of_adapter(
    base: str, status: EndpointStatus | None, *, lacks: str = "", comes: bool = False, wrong: str = ""
) -> EndpointStatus:
    """The status of an adapter, which the endpoint `base` serves. `status`: that of the base; None if there is none.

    `lacks`: why workers of the revision that answers cannot serve it, as a clause; `comes`: whether those of the one
    that is ordered can. If not, the base has gone back to a revision without room. `wrong`: what is wrong with the
    adapter's own files."""
    if status is None:
        return EndpointStatus("failed", f"there is no endpoint {base}, which is to serve it")
    if wrong:
        return EndpointStatus("failed", wrong)
    if lacks and not comes:
        why = f" ({status.reason})" if status.reason else ""
        return EndpointStatus("failed", f"endpoint {base}, which is to serve it, has no room for it: {lacks}{why}")
    if lacks:
        why = f"; {status.reason}" if status.reason else ""
        return EndpointStatus("starting", f"{base} is rolled: {lacks}{why}")
    if status.state in ("ready", "updating"):
        return EndpointStatus("ready", f"served by {base}")
    if status.state in ("parked", "asleep", "waking"):
        is_so = "wakes" if status.state == "waking" else f"is {status.state}: a request wakes it"
        return EndpointStatus(status.state, f"served by {base}, which {is_so}")
    state: EndpointState = "failed" if status.state == "failed" else "waiting"
    return EndpointStatus(state, f"endpoint {base}, which is to serve it, is {status.state}")


def _state(ordered: Ordered, seen: Mapping[int, Seen], takes: int | None) -> tuple[EndpointState, str]:
    current = seen.get(ordered.revision, Seen())
    if ordered.deleting:
        return "deleting", _finishing(seen.values())
    if takes == ordered.revision:
        return _answering(ordered, seen, current)
    if takes is not None:
        return "updating", f"revision {ordered.revision}: {_coming_up(ordered, current)[1]}"
    if current.has_failed:
        return "failed", current.error
    if ordered.wake_failed:
        return "failed", ordered.wake_failed
    if ordered.rest != "awake" and current.launched:
        # Requests are held already; only the frontend's part is built.
        return _resting(ordered, current)
    previous = seen.get(ordered.previous, Seen()) if ordered.previous is not None else Seen()
    if ordered.replace and current.launched and not previous.is_gone:
        return "starting", f"revision {ordered.previous} ends first: {_finishing([previous])}"
    return _coming_up(ordered, current)


def _answering(ordered: Ordered, seen: Mapping[int, Seen], current: Seen) -> tuple[EndpointState, str]:
    old = [one for number, one in seen.items() if number != ordered.revision and not one.is_gone]
    if old:
        return "updating", _finishing(old)
    if ordered.wake_failed:
        return "failed", ordered.wake_failed
    if ordered.rest != "awake":
        failure = "" if current.frontends.ready else current.frontends.failure
        return ("failed", failure) if failure else _resting(ordered, current)
    if ordered.workers and not current.workers.ready:
        return _without_worker(ordered, current)
    if not current.frontends.ready:
        # It was killed, say. Another one may fail where the first has not.
        failure = current.frontends.failure
        return ("failed", failure) if failure else ("starting", "no frontend is ready for it")
    lacking = ordered.workers + ordered.prefill_workers - current.workers.present - current.prefill.present
    if lacking > 0 and current.shortage and not current.under_way:
        return "ready", current.shortage
    return "ready", ordered.why or (current.error if current.failures else "")


def _resting(ordered: Ordered, current: Seen) -> tuple[EndpointState, str]:
    if ordered.rest == "asleep" or not current.workers.present:
        return "asleep", ordered.why
    if current.workers.parked and not current.workers.ready:
        return "parked", ordered.why
    return "ready", current.error or "its workers are about to be parked"


def _without_worker(ordered: Ordered, current: Seen) -> tuple[EndpointState, str]:
    """State and reason of a revision that takes requests, and has no worker that is ready."""
    if not current.has_workers and not current.under_way and current.shortage:
        return "waiting", current.shortage
    if not ordered.waking and not current.workers.parked:
        return "starting", current.error or "no worker is ready any more"
    held = current.frontends.held
    waits = f"{held} {'request waits' if held == 1 else 'requests wait'}" if held else ""
    what = current.doing or ("its workers go on" if current.workers.parked else "its workers start")
    return "waking", ", ".join(part for part in (what, waits, current.error) if part)


def _coming_up(ordered: Ordered, current: Seen) -> tuple[EndpointState, str]:
    """State and reason of a revision that has not answered yet."""
    if current.has_failed:
        return "failed", current.error
    if current.error and not current.under_way:
        return "starting", f"tried again after: {current.error}"
    if not current.launched:
        return "fetching", current.doing or "its model is looked up"
    if not current.has_workers and not current.under_way and current.shortage and ordered.workers:
        return "waiting", current.shortage
    if current.workers.ready and not current.frontends.are_ready:
        return "starting", "its frontend is not ready yet"
    return "waking" if ordered.waking else "starting", current.doing or "its workers start"


def _finishing(revisions: Iterable[Seen]) -> str:
    """What is awaited of revisions that end."""
    ending = list(revisions)
    numbers = [one.frontends.in_flight for one in ending]
    known = [number for number in numbers if number is not None]
    if sum(known):
        least = "" if len(known) == len(numbers) else "at least "
        return f"{least}{sum(known)} {'request' if sum(known) == 1 else 'requests'} under way"
    return "workers end" if all(one.frontends.are_done for one in ending) else "requests under way"
