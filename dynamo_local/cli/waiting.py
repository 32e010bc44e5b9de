"""Waits until a server or one of its endpoints is ready, also one that has not started yet, or until the server has
ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from dynamo_local.control.answers import WatcherRow
from dynamo_local.control.client import ANSWER_S, ControlClient
from dynamo_local.control.operations import LIST_WORKERS
from dynamo_local.core.errors import EndpointFailedError, NotRunningError, StateError, SupervisorError
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.messages.endpoints import Board, EndpointView
from dynamo_local.core.names import short_watcher
from dynamo_local.core.server_choice import START_REMEDY
from dynamo_local.supervisor.admin.endpoints import ANSWERS
from dynamo_local.supervisor.server.reports.report import Report, ReportOnce
from state.endpoints.board import read_board
from state.namespaces import is_running
from state.paths import StatePaths

LOGS_REMEDY = "`dynamo logs` has the reason if a process does not start; a longer --timeout may help"
_LOOK_EVERY_S = 0.3
_COMES_UP = frozenset({"fetching", "starting", "waking", "updating"})
Locate = Callable[[], StatePaths]
"""Returns the paths of the server that is meant. Raises NotRunningError as long as none runs."""


def wait_until_ready(
    locate: Locate, workers: int | None, timeout_s: float, report: Report, endpoint: str | None = None
) -> None:
    """Wait until every process of the server and every endpoint that comes up is ready, or every service and `workers`
    workers; with `endpoint`, until that endpoint is ready, or has so many workers.

    Raises SupervisorError when the server has ended, or they are not ready after `timeout_s`, and EndpointFailedError
    when the endpoint has failed.
    """
    give_up_at, progress = time.monotonic() + timeout_s, ReportOnce(report)
    seen, lacking = None, "nothing is known of the server yet"
    while (left_s := give_up_at - time.monotonic()) > 0:
        try:
            seen = _running(locate() if seen is None else seen)
            lacking = _missing_of(seen, workers, endpoint, left_s)
        except NotRunningError as error:
            if seen is not None:
                raise SupervisorError(
                    f"the server in namespace {seen.namespace} has ended before it was ready",
                    "`dynamo logs` has the reason",
                ) from error
            lacking = error.cause
        except (StateError, SupervisorError) as error:
            lacking = error.cause
        if not lacking:
            return
        progress.note(f"waiting: {lacking}")
        time.sleep(min(_LOOK_EVERY_S, left_s))
    raise SupervisorError(f"not ready after {timeout_s:g} s: {lacking}", START_REMEDY if seen is None else LOGS_REMEDY)


def wait_until_stopped(paths: StatePaths, timeout_s: float) -> None:
    """Wait until no server runs in the namespace. Raises SupervisorError when one still runs after `timeout_s`."""
    give_up_at = time.monotonic() + timeout_s
    while is_running(paths):
        if time.monotonic() >= give_up_at:
            raise SupervisorError(
                f"the server in namespace {paths.namespace} still runs after {timeout_s:g} s", "`dynamo stop` ends it"
            )
        time.sleep(_LOOK_EVERY_S)


def missing(rows: Sequence[WatcherRow], workers: int | None) -> str:
    """Say what is not ready yet; empty if the server is. Pure.

    `workers`: number of workers that must be ready; None for all that have or await a process.
    """
    present = [row for row in rows if row.state != "stopped"]
    # A parked worker is where it is wanted: requests wake it.
    waited = [row for row in present if row.state not in ("ready", "parked")]
    if workers is None:
        return ", ".join(map(_described, waited))
    services = [_described(row) for row in waited if row.role not in ENGINE_ROLES]
    ready = sum(row.state == "ready" and row.role in ENGINE_ROLES for row in present)
    few = [f"{ready} of {workers} workers are ready"] if ready < workers else []
    return ", ".join([*services, *few])


def missing_endpoints(board: Board | None) -> str:
    """Say which endpoints come up by themselves and are not ready yet; empty if all are. Pure.

    One that waits for devices or has failed needs somebody's order, and is not waited for.
    """
    views = () if board is None else board.endpoints
    return ", ".join(_shown(view) for view in views if view.status.state in _COMES_UP)


def missing_of_endpoint(name: str, board: Board | None, workers: int | None) -> str:
    """Say what an endpoint lacks until it is ready, or has `workers` ready workers; empty if nothing. Pure.

    Raises EndpointFailedError if it has failed.
    """
    view = None if board is None else next((view for view in board.endpoints if view.spec.name == name), None)
    if view is None:
        return f"there is no endpoint {name!r}"
    if view.status.state == "failed":
        raise EndpointFailedError(name, view.status.reason)
    if workers is not None:
        return "" if view.status.ready >= workers else f"{view.status.ready} of {workers} workers of {name} are ready"
    return "" if view.status.state in ANSWERS else _shown(view)


def _shown(view: EndpointView) -> str:
    status = view.status
    state = f"{status.state}, {status.reason}" if status.reason else status.state
    return f"endpoint {view.spec.name} ({state})"


def _missing_of(paths: StatePaths, workers: int | None, endpoint: str | None, within_s: float) -> str:
    """Say what is not ready; empty if all is. Raises NotRunningError, SupervisorError, StateError,
    EndpointFailedError."""
    if endpoint is not None:
        return missing_of_endpoint(endpoint, read_board(paths), workers)
    answer = ControlClient(paths).do(LIST_WORKERS, timeout_s=min(within_s, ANSWER_S))
    processes = missing(msgspec.convert(answer["data"], list[WatcherRow]), workers)
    endpoints = "" if workers is not None else missing_endpoints(read_board(paths))
    return ", ".join(filter(None, (processes, endpoints)))


def _running(paths: StatePaths) -> StatePaths:
    if not is_running(paths):
        raise NotRunningError(f"no server runs in namespace {paths.namespace}")
    return paths


def _described(row: WatcherRow) -> str:
    state = f"{row.state}, {row.detail}" if row.detail else row.state
    return f"{short_watcher(row.watcher)} ({state})"
