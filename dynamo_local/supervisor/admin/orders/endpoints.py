"""`dynamo endpoint`: orders to a running server and what comes of them, and what is ordered while none runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import msgspec

from dynamo_local.core.endpoints.refusals import error_of
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import BusError, EndpointAbsentError, EndpointFailedError, SupervisorError
from dynamo_local.core.messages.endpoints import (
    EndpointHistory,
    EndpointOrder,
    EndpointsAnswer,
    EndpointState,
    EndpointStatus,
    EndpointView,
    ListEndpoints,
)
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.admin.connect import bus_of
from dynamo_local.supervisor.server.reports.report import Report, ReportOnce
from state.endpoints.registry import read_registry
from state.paths import StatePaths

if TYPE_CHECKING:
    from dynamo_local.bus.nats import Bus

_ANSWERED_WITHIN_S = 15.0
_LOOK_EVERY_S = 0.3

RESTS: frozenset[EndpointState] = frozenset({"parked", "asleep"})
ANSWERS: frozenset[EndpointState] = frozenset({"ready", *RESTS})
"""States in which an endpoint answers requests, be it that it is woken for them."""


class EndpointRow(msgspec.Struct, frozen=True):
    """An endpoint as it is shown. `status` None: no server runs. Times are of the wall clock, in seconds since 1970."""

    spec: EndpointSpec
    status: EndpointStatus | None
    created_at: float
    updated_at: float
    served_names: tuple[str, ...] = ()
    history: EndpointHistory = EndpointHistory()


class EndpointClient:
    """Takes orders to the server that answers on a bus."""

    def __init__(self, bus: Bus, namespace: str, *, look_every_s: float = _LOOK_EVERY_S) -> None:
        self._bus = bus
        self._namespace = namespace
        self._look_every_s = look_every_s

    async def send(self, order: EndpointOrder) -> tuple[EndpointView, ...]:
        """The endpoints that the server answers with. Raises UsageError if it refuses the order, SupervisorError if it
        cannot carry it out or does not answer."""
        subject = Subjects(self._namespace).endpoints
        try:
            answer = await self._bus.ask(subject, order, EndpointsAnswer, timeout_s=_ANSWERED_WITHIN_S)
        except BusError as error:
            raise SupervisorError(
                f"the server in namespace {self._namespace} does not answer about endpoints",
                "it may be starting or stopping: see `dynamo ls`",
            ) from error
        if answer.refused is not None:
            raise error_of(answer.refused)
        return answer.endpoints

    async def order(self, order: EndpointOrder) -> EndpointView:
        """The one endpoint that was ordered, as it is now. Raises as `send`."""
        endpoints = await self.send(order)
        if len(endpoints) != 1:
            raise SupervisorError(f"the server answered with {len(endpoints)} endpoints in place of one")
        return endpoints[0]

    async def wait_until_ready(
        self,
        ordered: EndpointView,
        timeout_s: float,
        report: Report,
        states: Collection[EndpointState] = ANSWERS,
    ) -> EndpointView:
        """Wait until the endpoint is as ordered, and in one of the states. Raises EndpointFailedError if it fails,
        SupervisorError, with the reason, if it was changed meanwhile or takes longer."""
        progress, view = ReportOnce(report), ordered
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not is_done(ordered, view, states):
                    progress.note(progress_of(view))
                    await asyncio.sleep(self._look_every_s)
                    view = await self.order(ListEndpoints(ordered.spec.name))
                return view
        name = ordered.spec.name
        raise SupervisorError(
            f"endpoint {name} is not {'ready' if 'ready' in states else 'parked'} after {timeout_s:g} s: "
            f"{progress_of(view)}",
            f"it stays ordered: `dynamo endpoint get {name}` shows how it goes on",
        )

    async def wait_until_gone(self, name: str, timeout_s: float, report: Report) -> None:
        """Wait until nothing is left of a deleted endpoint. Raises SupervisorError if that takes longer."""
        progress = ReportOnce(report)
        with suppress(TimeoutError, EndpointAbsentError):
            async with asyncio.timeout(timeout_s):
                while True:
                    progress.note(progress_of(await self.order(ListEndpoints(name))))
                    await asyncio.sleep(self._look_every_s)
        with suppress(EndpointAbsentError):
            left = await self.order(ListEndpoints(name))
            raise SupervisorError(
                f"endpoint {name} is not gone after {timeout_s:g} s: {progress_of(left)}",
                "it ends once its last request has: see `dynamo requests`",
            )


@asynccontextmanager
async def client_of(paths: StatePaths) -> AsyncIterator[EndpointClient]:
    """Connect to the namespace's server. Raises as `connect.bus_of`."""
    async with bus_of(paths, "endpoint") as bus:
        yield EndpointClient(bus, paths.namespace)


async def list_endpoints(paths: StatePaths, name: str | None = None) -> list[EndpointRow]:
    """All endpoints of a running server, or the one of that name. Raises EndpointAbsentError, and as `client_of`."""
    async with client_of(paths) as client:
        views = await client.send(ListEndpoints(name))
    return [
        EndpointRow(view.spec, view.status, view.created_at, view.updated_at, view.served_names, view.history)
        for view in views
    ]


def ordered_endpoints(paths: StatePaths, name: str | None = None) -> list[EndpointRow]:
    """As `list_endpoints`, from the registry alone, while no server runs. Raises EndpointAbsentError, StateError."""
    registry = read_registry(paths)
    entries = registry.entries.values() if name is None else (registry.entry(name),)
    return [EndpointRow(entry.spec, None, entry.created_at, entry.updated_at) for entry in entries]


def is_done(ordered: EndpointView, view: EndpointView, states: Collection[EndpointState] = ANSWERS) -> bool:
    """Whether an endpoint is as ordered. Raises EndpointFailedError or SupervisorError if it never will be. Pure."""
    name, reason = view.spec.name, view.status.reason
    if view.status.state == "failed":
        raise EndpointFailedError(name, reason)
    if view.status.state == "deleting":
        raise SupervisorError(f"endpoint {name} is being deleted")
    if view.spec != ordered.spec:
        cause = (
            f"the update of endpoint {name} failed: {reason}" if reason else f"endpoint {name} was changed meanwhile"
        )
        raise SupervisorError(cause, f"see `dynamo endpoint get {name}`")
    return view.status.state in states


def progress_of(view: EndpointView) -> str:
    """The state of an endpoint in a line. Pure."""
    status = view.status
    counts = f"{status.ready} of {status.wanted} workers ready" if status.wanted else ""
    if status.wanted_prefill:
        counts += f", {status.ready_prefill} of {status.wanted_prefill} prefill workers ready"
    return ": ".join(part for part in (f"{view.spec.name} is {status.state}", status.reason or counts) if part)
