"""What `dynamo wait` waits for."""

from __future__ import annotations

import pytest

from dynamo_local.supervisor.admin.status import Row
from dynamo_local.supervisor.admin.wait import missing


def row(watcher: str, role: str, state: str = "ready", detail: str = "") -> Row:
    return Row(watcher=watcher, component="C", role=role, pid=1, devices=(), state=state, detail=detail)


FRONTEND = row("n_Frontend", "frontend")
WORKERS = [row("n_W", "decode"), row("n_W_1", "decode", "starting", "loading weights"), row("n_P", "prefill")]


def test_all_that_have_a_process_must_be_ready() -> None:
    assert missing([FRONTEND, WORKERS[0], row("n_P", "prefill", "stopped")], None) == ""
    assert missing([FRONTEND, *WORKERS], None) == "W_1 (starting, loading weights)"


@pytest.mark.parametrize(("workers", "lacking"), [(0, ""), (2, ""), (3, "2 of 3 workers are ready")])
def test_so_many_workers_suffice(workers: int, lacking: str) -> None:
    assert missing([FRONTEND, *WORKERS], workers) == lacking


def test_services_must_be_ready_however_many_workers_are() -> None:
    assert missing([row("n_Frontend", "frontend", "starting"), *WORKERS], 1) == "Frontend (starting)"
