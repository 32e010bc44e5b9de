"""What there is of an endpoint's revisions: workers, by statefile and presences; frontends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Coroutine, Iterable, Mapping
from typing import Any

from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.endpoints.rollout import Frontends, Workers
from dynamo_local.core.fleet.view import FRONTEND_ROLE, PREFILL_ROLE, FleetView, in_flight_of
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.names import Revision, parse_revision
from dynamo_local.core.subjects import Subjects
from state.statefile.model import Component, State

Spawn = Callable[[str, Coroutine[Any, Any, None]], "asyncio.Task[None]"]
"""TaskGuard.spawn."""


class RevisionWatch:
    """The processes of one revision, as they are heard on the bus. `on_change` is called with every change."""

    def __init__(self, bus: Bus, subjects: Subjects, on_change: Callable[[], None], spawn: Spawn) -> None:
        self._watch = FleetWatch(bus, subjects)
        self._watch.subscribe(lambda _: on_change())
        self._spawn = spawn
        self._name = subjects.revision
        self._expiry: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to listen. Raises BusError."""
        await self._watch.start()
        self._expiry = self._spawn(f"fleet of {self._name}", self._watch.run())

    async def stop(self) -> None:
        """Listen no more."""
        await self._watch.stop()
        if self._expiry is not None:
            self._expiry.cancel()

    @property
    def view(self) -> FleetView:
        return self._watch.view


def revisions_of(state: State, endpoint: str) -> set[int]:
    """Numbers of the endpoint's revisions that have entries of workers."""
    found = {component.revision for component in state.components.values() if component.holds}
    parsed = (parse_revision(revision) for revision in found if revision)
    return {revision.number for revision in parsed if revision.endpoint == endpoint}


def workers_of(
    state: State, revision: Revision, view: FleetView, given_up: Container[str] = ()
) -> tuple[Workers, Workers]:
    """The workers of a revision that answer, and those that prefill. `given_up`: watchers that are not started any
    more."""
    mine = [c for c in state.components.values() if c.revision == str(revision) and c.holds]
    mine.sort(key=lambda component: component.watcher)
    states: dict[str, str] = dict.fromkeys((one.lease for one in view.members() if one.state == "parked"), "parked")
    states |= {presence.lease: "ready" for presence in view.ready({component.role for component in mine})}
    prefill = [component for component in mine if component.role == PREFILL_ROLE]
    return _sorted([c for c in mine if c not in prefill], states, given_up), _sorted(prefill, states, given_up)


def _sorted(components: Iterable[Component], states: Mapping[str, str], given_up: Container[str]) -> Workers:
    by_state: dict[str, list[str]] = {"ready": [], "starting": [], "ending": [], "dead": [], "parked": []}
    for component in components:
        by_state[_state(component, states, given_up)].append(component.watcher_name)
    return Workers(**{state: tuple(names) for state, names in by_state.items()})


def _state(component: Component, states: Mapping[str, str], given_up: Container[str]) -> str:
    """`states`: "ready" and "parked" leases. A parked worker may have been given up because it cannot be woken."""
    if component.phase == "retiring":
        return "ending"
    state = "starting" if component.phase is not None else states.get(component.lease or "", "starting")
    if state == "ready" or component.phase is not None:
        return state
    return "dead" if component.watcher_name in given_up else state


def frontends_of(view: FleetView, server: Iterable[Presence] = (), number: int = 1) -> Frontends:
    """The frontends that announce themselves in a revision. `server`: the processes of the server itself, of which so
    many are to be frontends."""
    found = _frontends(view)
    heard = {one.lease for one in found}
    # One that starts reads the board before it takes requests.
    missing = sum(one.role == FRONTEND_ROLE and one.state == "ready" and one.lease not in heard for one in server)
    ready, starting, draining = (
        sum(one.state == state for one in found) for state in ("ready", "starting", "draining")
    )
    failed = (one for one in found if one.state == "failed")
    failure = next((one.detail or "the frontend cannot serve it" for one in failed), "")
    held = [None if one.counts is None else one.counts.held for one in found]
    known = [number for number in held if number is not None]
    return Frontends(
        ready,
        starting,
        draining,
        in_flight_of(found) if found else 0,
        failure,
        sum(known) if len(known) == len(held) else None,
        missing,
        max(0, number - len(found) - missing),
    )


def doing(view: FleetView) -> str:
    """What workers that start are doing, in words; empty if none says so."""
    details = {one.detail for one in view.members() if one.state == "starting" and one.role != FRONTEND_ROLE}
    return ", ".join(sorted(details - {""}))


def _frontends(view: FleetView) -> list[Presence]:
    return [presence for presence in view.members() if presence.role == FRONTEND_ROLE]
