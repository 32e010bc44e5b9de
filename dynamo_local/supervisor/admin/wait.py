"""`dynamo wait`: waits until a server or one of its endpoints is ready, also one that has not started yet, or until the
server has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from dynamo_local.core.errors import BusError, EndpointFailedError, NotRunningError, StateError, SupervisorError
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.messages.endpoints import Board, EndpointView
from dynamo_local.core.names import short_watcher
from dynamo_local.core.server_choice import START_REMEDY
from dynamo_local.supervisor.admin.connect import state_of
from dynamo_local.supervisor.admin.orders.endpoints import ANSWERS
from dynamo_local.supervisor.admin.status import Row, list_watchers
from dynamo_local.supervisor.server.reports.report import Report, ReportOnce
from state.endpoints.board import read_board
from state.namespaces import is_running
from state.paths import StatePaths

LOGS_REMEDY = "`dynamo logs` has the reason if a process does not start; a longer --timeout may help"
_LOOK_EVERY_S = 0.3
_COMES_UP = frozenset({"fetching", "starting", "waking", "updating"})

Locate = Callable[[], StatePaths]
"""Returns the paths of the server that is meant. Raises NotRunningError as long as none runs."""


async def wait_until_ready(
    locate: Locate, workers: int | None, timeout_s: float, report: Report, endpoint: str | None = None
) -> StatePaths:
    """Wait until every process of the server and every endpoint that comes up is ready, or every service and `workers`
    workers; with `endpoint`, until that endpoint is ready, or has so many workers. Returns the server's paths.

    Raises SupervisorError when the server has ended, or they are not ready after `timeout_s`, and EndpointFailedError
    when the endpoint has failed.
    """
    waiting = _Waiting(locate, workers, report, endpoint)
    try:
        async with asyncio.timeout(timeout_s):
            return await waiting.until_ready()
    except TimeoutError as error:
        raise SupervisorError(
            f"not ready after {timeout_s:g} s: {waiting.missing}",
            START_REMEDY if waiting.seen is None else LOGS_REMEDY,
        ) from error


def wait_until_stopped(paths: StatePaths, timeout_s: float) -> None:
    """Wait until no server runs in the namespace. Raises SupervisorError when one still runs after `timeout_s`."""
    give_up_at = time.monotonic() + timeout_s
    while is_running(paths):
        if time.monotonic() >= give_up_at:
            raise SupervisorError(
                f"the server in namespace {paths.namespace} still runs after {timeout_s:g} s", "`dynamo stop` ends it"
            )
        time.sleep(_LOOK_EVERY_S)


def missing(rows: Sequence[Row], workers: int | None) -> str:
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


class _Waiting:
    """The progress of a wait.

    `missing`: what is not ready, as it was seen last. `seen`: the paths of the server, once it runs.
    """

    def __init__(self, locate: Locate, workers: int | None, report: Report, endpoint: str | None) -> None:
        self._locate = locate
        self._workers = workers
        self._endpoint = endpoint
        self._report = ReportOnce(report)
        self.seen: StatePaths | None = None
        self.missing = "nothing is known of the server yet"

    async def until_ready(self) -> StatePaths:
        while True:
            self.missing = await self._look()
            if not self.missing and self.seen is not None:
                return self.seen
            self._report.note(f"waiting: {self.missing}")
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _look(self) -> str:
        if self.seen is None:
            try:
                self.seen = await asyncio.to_thread(self._find)
            except NotRunningError as error:
                return error.cause
        try:
            return await self._missing_of(self.seen)
        except NotRunningError as error:
            namespace = self.seen.namespace
            raise SupervisorError(
                f"the server in namespace {namespace} has ended before it was ready", "`dynamo logs` has the reason"
            ) from error
        except (BusError, StateError, SupervisorError) as error:
            return error.cause

    async def _missing_of(self, paths: StatePaths) -> str:
        if self._endpoint is not None:
            await state_of(paths)
            return missing_of_endpoint(self._endpoint, await asyncio.to_thread(read_board, paths), self._workers)
        processes = missing(await list_watchers(paths), self._workers)
        if self._workers is not None:
            return processes
        endpoints = missing_endpoints(await asyncio.to_thread(read_board, paths))
        return ", ".join(filter(None, (processes, endpoints)))

    def _find(self) -> StatePaths:
        paths = self._locate()
        if not is_running(paths):
            raise NotRunningError(f"no server runs in namespace {paths.namespace}")
        return paths


def _described(row: Row) -> str:
    state = f"{row.state}, {row.detail}" if row.detail else row.state
    return f"{short_watcher(row.watcher)} ({state})"
