"""What `dynamo wait` waits for."""

from __future__ import annotations

import pytest

from dynamo_local.cli.waiting import missing, missing_endpoints, missing_of_endpoint
from dynamo_local.control.answers import WatcherRow
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import EndpointFailedError
from dynamo_local.core.messages.endpoints import Board, EndpointState, EndpointStatus, EndpointView


def row(watcher: str, role: str, state: str = "ready", detail: str = "") -> WatcherRow:
    return WatcherRow(watcher=watcher, component="C", role=role, pid=1, devices=(), state=state, detail=detail)


FRONTEND = row("n_Frontend", "frontend")
WORKERS = [row("n_W", "decode"), row("n_W_1", "decode", "starting", "loading weights"), row("n_P", "prefill")]


def test_all_that_have_a_process_must_be_ready() -> None:
    assert missing([FRONTEND, WORKERS[0], row("n_P", "prefill", "stopped")], None) == ""
    assert missing([FRONTEND, *WORKERS], None) == "W_1 (starting, loading weights)"
    parked = row("n_W_2", "aggregated", "parked")
    assert missing([FRONTEND, WORKERS[0], parked], None) == ""
    assert missing([FRONTEND, parked], 1) == "0 of 1 workers are ready"


@pytest.mark.parametrize(("workers", "lacking"), [(0, ""), (2, ""), (3, "2 of 3 workers are ready")])
def test_so_many_workers_suffice(workers: int, lacking: str) -> None:
    assert missing([FRONTEND, *WORKERS], workers) == lacking


def test_services_must_be_ready_however_many_workers_are() -> None:
    assert missing([row("n_Frontend", "frontend", "starting"), *WORKERS], 1) == "Frontend (starting)"


def endpoint(name: str, state: EndpointState, reason: str = "", ready: int = 0) -> EndpointView:
    return EndpointView(EndpointSpec(name=name, model="m"), EndpointStatus(state, reason, ready=ready), 1.0, 2.0)


def test_endpoints_that_come_up_are_waited_for_and_those_that_need_somebody_are_not() -> None:
    fetched, broken = endpoint("a", "fetching", "2 of 5 GB"), endpoint("b", "failed", "no weights")
    others = (endpoint("c", "waiting", "for a device"), endpoint("d", "ready"), endpoint("e", "starting"))
    assert missing_endpoints(Board(1, (), (fetched, broken, *others))) == (
        "endpoint a (fetching, 2 of 5 GB), endpoint e (starting)"
    )
    assert missing_endpoints(Board(1, (), (broken, *others[:2]))) == missing_endpoints(None) == ""


@pytest.mark.parametrize(
    ("state", "workers", "lacking"),
    [
        ("ready", None, ""),
        ("updating", None, "endpoint chat (updating)"),
        ("waiting", None, "endpoint chat (waiting)"),
        ("waking", None, "endpoint chat (waking)"),
        ("parked", None, ""),
        ("asleep", None, ""),
        ("updating", 1, ""),
        ("ready", 3, "1 of 3 workers of chat are ready"),
    ],
)
def test_an_endpoint_must_be_ready_or_have_so_many_workers(
    state: EndpointState, workers: int | None, lacking: str
) -> None:
    board = Board(1, (), (endpoint("other", "starting"), endpoint("chat", state, ready=1)))
    assert missing_of_endpoint("chat", board, workers) == lacking


def test_an_endpoint_may_be_created_later_and_one_that_failed_ends_the_wait() -> None:
    assert missing_of_endpoint("chat", None, None) == "there is no endpoint 'chat'"
    board = Board(1, (), (endpoint("chat", "failed", "no weights"),))
    assert missing_of_endpoint("cha", board, None) == "there is no endpoint 'cha'"
    with pytest.raises(
        EndpointFailedError,
        match=r"endpoint chat has failed: no weights; it stays ordered: .dynamo endpoint update chat",
    ):
        missing_of_endpoint("chat", board, 1)
