"""`dynamo endpoint`: orders to a running server and what comes of them, and what is ordered while none runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec

from dynamo_local.control.client import ControlClient
from dynamo_local.control.events import events_of
from dynamo_local.control.operations import DELETE_ENDPOINT, GET_ENDPOINT, LIST_ENDPOINTS, LIST_EVENTS, Operation
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import EndpointAbsentError, EndpointFailedError, SupervisorError
from dynamo_local.core.messages.endpoints import (
    EndpointHistory,
    EndpointState,
    EndpointStatus,
    EndpointView,
    progress_of,
    view_of,
)
from dynamo_local.core.messages.reports import STATE
from dynamo_local.core.names import check_endpoint
from dynamo_local.supervisor.server.reports.report import Report, ReportOnce
from state.endpoints.registry import read_registry
from state.paths import StatePaths

RESTS: frozenset[EndpointState] = frozenset({"parked", "asleep"})
AWAKE: frozenset[EndpointState] = frozenset({"ready"})
ANSWERS: frozenset[EndpointState] = AWAKE | RESTS
"""States in which an endpoint answers requests, be it that it is woken for them."""


class EndpointRow(msgspec.Struct, frozen=True):
    """An endpoint as it is shown. `status` None: no server runs. Times are of the wall clock, in seconds since 1970."""

    spec: EndpointSpec
    status: EndpointStatus | None
    created_at: float
    updated_at: float
    served_names: tuple[str, ...] = ()
    history: EndpointHistory = EndpointHistory()


@dataclass(frozen=True)
class EndpointClient:
    """Takes orders to a server, and waits for what comes of them. Blocks."""

    server: ControlClient

    def order(self, operation: Operation, name: str = "", fields: dict[str, Any] | None = None) -> EndpointView:
        """The endpoint that is ordered or asked for, as it is now. Raises as `ControlClient.do`."""
        return view_of(self._do(operation, name, fields))

    def delete(self, name: str) -> None:
        """Order the end of an endpoint. Raises as `ControlClient.do`."""
        self._do(DELETE_ENDPOINT, name)

    def list(self) -> list[EndpointView]:
        """All endpoints as they are now. Raises as `ControlClient.do`."""
        return [view_of(content) for content in self.server.do(LIST_ENDPOINTS)["data"]]

    def wait_until_ready(
        self,
        ordered: EndpointView,
        timeout_s: float,
        report: Report,
        states: Collection[EndpointState] = ANSWERS,
    ) -> EndpointView:
        """Wait until the endpoint is as ordered, and in one of the states. Raises EndpointFailedError if it fails,
        SupervisorError, with the reason, if it was changed meanwhile or takes longer."""
        name, progress, view = ordered.spec.name, ReportOnce(report), ordered
        for view in chain((ordered,), self._views(name, timeout_s)):
            if is_done(ordered, view, states):
                return view
            progress.note(progress_of(view))
        raise SupervisorError(
            f"endpoint {name} is not {'ready' if 'ready' in states else 'parked'} after {timeout_s:g} s: "
            f"{progress_of(view)}",
            f"it stays ordered: `dynamo endpoint get {name}` shows how it goes on",
        )

    def wait_until_gone(self, name: str, timeout_s: float, report: Report) -> None:
        """Wait until nothing is left of a deleted endpoint. Raises SupervisorError if that takes longer."""
        progress, left = ReportOnce(report), ""
        with suppress(EndpointAbsentError):
            for view in self._views(name, timeout_s):
                left = progress_of(view)
                progress.note(left)
            raise SupervisorError(
                f"endpoint {name} is not gone after {timeout_s:g} s: {left}",
                "it ends once its last request has: see `dynamo requests`",
            )

    def _views(self, name: str, within_s: float) -> Iterator[EndpointView]:
        """Yield the endpoint as it is now, and as it is after each change of its state, until the time is over. Raises
        as `ControlClient.do`."""
        last = self.server.do(LIST_EVENTS, query={"after": "now"})["last"]
        yield self.order(GET_ENDPOINT, name)
        for _, event in events_of(self.server.paths, timeout_s=within_s, after=last, kinds=(STATE,)):
            if event.endpoint == name:
                yield self.order(GET_ENDPOINT, name)

    def _do(self, operation: Operation, name: str, fields: dict[str, Any] | None = None) -> Any:
        if operation.names:
            check_endpoint(name)
        return self.server.do(operation, fields, name=name)


def list_endpoints(paths: StatePaths, name: str | None = None) -> list[EndpointRow]:
    """All endpoints of a running server, or the one of that name. Raises EndpointAbsentError, and as
    `ControlClient.do`."""
    client = EndpointClient(ControlClient(paths))
    views = client.list() if name is None else [client.order(GET_ENDPOINT, name)]
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
