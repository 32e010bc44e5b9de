"""`dynamo endpoint`: orders to a running server and what comes of them, and what is ordered while none runs."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo_local.control.client import ControlClient
from dynamo_local.control.operations import DELETE_ENDPOINT, GET_ENDPOINT, LIST_ENDPOINTS, Operation
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import EndpointAbsentError, EndpointFailedError, SupervisorError
from dynamo_local.core.messages.endpoints import EndpointHistory, EndpointState, EndpointStatus, EndpointView, view_of
from dynamo_local.core.names import check_endpoint
from dynamo_local.supervisor.server.reports.report import Report, ReportOnce
from state.endpoints.registry import read_registry
from state.paths import StatePaths

_LOOK_EVERY_S = 0.3

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
    look_every_s: float = _LOOK_EVERY_S

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
        progress, view, deadline = ReportOnce(report), ordered, time.monotonic() + timeout_s
        while not is_done(ordered, view, states):
            progress.note(progress_of(view))
            self._pause(deadline)
            if time.monotonic() >= deadline:
                name = ordered.spec.name
                raise SupervisorError(
                    f"endpoint {name} is not {'ready' if 'ready' in states else 'parked'} after {timeout_s:g} s: "
                    f"{progress_of(view)}",
                    f"it stays ordered: `dynamo endpoint get {name}` shows how it goes on",
                )
            view = self.order(GET_ENDPOINT, ordered.spec.name)
        return view

    def wait_until_gone(self, name: str, timeout_s: float, report: Report) -> None:
        """Wait until nothing is left of a deleted endpoint. Raises SupervisorError if that takes longer."""
        progress, deadline = ReportOnce(report), time.monotonic() + timeout_s
        with suppress(EndpointAbsentError):
            while True:
                left = self.order(GET_ENDPOINT, name)
                if time.monotonic() >= deadline:
                    raise SupervisorError(
                        f"endpoint {name} is not gone after {timeout_s:g} s: {progress_of(left)}",
                        "it ends once its last request has: see `dynamo requests`",
                    )
                progress.note(progress_of(left))
                self._pause(deadline)

    def _do(self, operation: Operation, name: str, fields: dict[str, Any] | None = None) -> Any:
        if operation.names:
            check_endpoint(name)
        return self.server.do(operation, fields, name=name)

    def _pause(self, deadline: float) -> None:
        time.sleep(max(0.0, min(self.look_every_s, deadline - time.monotonic())))


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


def progress_of(view: EndpointView) -> str:
    """The state of an endpoint in a line. Pure."""
    status = view.status
    counts = f"{status.ready} of {status.wanted} workers ready" if status.wanted else ""
    if status.wanted_prefill:
        counts += f", {status.ready_prefill} of {status.wanted_prefill} prefill workers ready"
    return ": ".join(part for part in (f"{view.spec.name} is {status.state}", status.reason or counts) if part)
