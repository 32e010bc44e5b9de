"""CPU seconds from /proc."""

from __future__ import annotations

import os

import pytest

from benchmarks.harness.accounting import Usage, add, descendants, is_alive, parse_machine, parse_stat, role_of, usage

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
LINE = "7 (a ) b) S 3 7 7 0 -1 4194560 100 0 0 0 20 5 0 0 20 0 1 0 900 1 2 3"


def test_a_command_may_hold_parentheses() -> None:
    stat = parse_stat(LINE)
    assert (stat.cpu_s, stat.started_s) == (25 * TICK_S, 900 * TICK_S)


def test_waiting_and_stolen_time_is_not_busy_time() -> None:
    #          user nice system idle iowait irq softirq steal guest
    busy_s, stolen_s = parse_machine("cpu  10 1 5 1000 300 2 3 40 7\ncpu0 1 1\n")
    assert busy_s == pytest.approx(21 * TICK_S)
    assert stolen_s == pytest.approx(40 * TICK_S)


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("VLLM::EngineCore", "EngineCore"),
        ("VLLM::Worker", "Worker"),
        ("python -m dynamo_local.process.main --namespace bench --service Frontend ", "frontend"),
        ("python -m dynamo_local.process.main --namespace bench --service VllmWorker ", "worker host"),
        ("python -m dynamo_local.process.main --namespace bench --service PrefillWorker ", "prefill host"),
        ("python -c from multiprocessing.resource_tracker import main", "other"),
    ],
)
def test_roles(command: str, role: str) -> None:
    assert role_of(command) == role


def test_what_others_used() -> None:
    before = Usage({"a": 1.0}, busy_s=10.0, stolen_s=0.5, at=100.0)
    after = Usage({"a": 2.0, "b": 0.5}, busy_s=14.0, stolen_s=1.0, at=104.0)
    used = after.since(before)
    assert used.roles == {"a": 1.0, "b": 0.5}
    assert used.foreign_cores == pytest.approx((4.0 - 1.5 + 0.5) / 4.0)


def test_turns_are_summed() -> None:
    total = add([Usage({"a": 1.0}, 2.0, 0.0, 4.0), Usage({"a": 0.5, "b": 1.0}, 2.0, 1.0, 4.0)])
    assert (total.roles, total.busy_s, total.stolen_s, total.at) == ({"a": 1.5, "b": 1.0}, 4.0, 1.0, 8.0)


def test_this_process_is_found_and_uses_time() -> None:
    (me, *_) = (process for process in descendants(os.getpid()) if process.pid == os.getpid())
    assert is_alive(me)
    before = usage([me])
    while usage([me]).since(before).roles[me.role] < 3 * TICK_S:
        pass
