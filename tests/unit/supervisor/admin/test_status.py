from __future__ import annotations

import msgspec
import pytest

from dynamo_local.cli.look.ps import _cells, as_table
from dynamo_local.core.messages.kv import KvWays
from dynamo_local.core.messages.presence import EngineInfo, Load, Presence, ProcessState
from dynamo_local.supervisor.admin.watchers import in_order, row
from state.statefile.model import Component, Resources

WORKER = Component("ns_W", "W", "decode", "cmd", Resources((1,)), lease="l", pid=7)
LEAVES = msgspec.structs.replace(WORKER, phase="retiring")
COMES = msgspec.structs.replace(WORKER, phase="starting")
AWAY = "the bus does not answer"
TEMPLATE = Component("ns_W", "W", "decode", "cmd")
BUS = Component("ns_Nats", "Nats", "bus", "cmd", Resources(()))
FORKSERVER = Component("ns_ForkServer", "ForkServer", "forkserver", "cmd", Resources(()))


def says(state: ProcessState, pid: int = 7, detail: str = "") -> Presence:
    return Presence("ns_W", "W", "decode", "l", pid, state, detail, url="http://here")


@pytest.mark.parametrize(
    ("component", "status", "pids", "presence", "away", "expected"),
    [
        (WORKER, "active", (7,), says("ready"), "", ("ready", "")),
        (WORKER, "active", (7,), says("starting", detail="loading"), "", ("starting", "loading")),
        (WORKER, "active", (7,), None, "", ("silent", "")),
        (WORKER, "active", (7,), None, AWAY, ("unknown", "the bus does not answer")),
        (WORKER, "active", (7,), says("ready", pid=6), "", ("silent", "")),
        # Forked: circus knows the launcher.
        (WORKER, "active", (8,), says("ready", pid=7), "", ("ready", "")),
        (FORKSERVER, "active", (9,), None, "", ("ready", "")),
        (FORKSERVER, "stopped", (), None, "", ("ended", "to be started again")),
        (WORKER, "stopped", (), says("ready"), "", ("ended", "to be started again")),
        (WORKER, None, (), None, "", ("ended", "to be started")),
        (TEMPLATE, None, (), None, "", ("stopped", "")),
        (LEAVES, "active", (7,), says("draining", detail="2 left"), "", ("retiring", "draining: 2 left")),
        (LEAVES, "stopped", (), says("draining"), "", ("retiring", "no process")),
        (COMES, "active", (7,), says("ready"), "", ("starting", "ready")),
        (COMES, "active", (8,), says("ready", pid=6), "", ("starting", "")),
        (BUS, "active", (3,), None, "", ("ready", "")),
        (BUS, "active", (3,), None, AWAY, ("failed", "does not answer")),
        (BUS, "active", (3,), None, "the server is stopping", ("ready", "")),
        (WORKER, "active", (7,), None, "the server is stopping", ("unknown", "the server is stopping")),
    ],
)
def test_state_is_what_the_process_says_else_what_is_seen_of_it(
    component: Component,
    status: str | None,
    pids: tuple[int, ...],
    presence: Presence | None,
    away: str,
    expected: tuple[str, str],
) -> None:
    found = row(component, status, pids, presence, away)
    assert (found.state, found.detail) == expected


def test_a_row_has_what_the_statefile_and_the_process_tell() -> None:
    found = row(WORKER, "active", (7,), says("ready"), "")
    assert (found.watcher, found.component, found.role) == ("ns_W", "W", "decode")
    assert (found.pid, found.devices, found.url) == (7, (1,), "http://here")


def test_a_worker_that_lends_no_kv_says_why() -> None:
    engine = EngineInfo("vllm", "m", 1024, 32, 100, 8, no_transfer="the model keeps a state")
    presence = msgspec.structs.replace(says("ready"), engine=engine, load=Load(0, 0, 0.0), url=None)
    found = row(WORKER, "active", (7,), presence, "")
    assert found.no_transfer == "the model keeps a state"
    assert _cells(found)[-1] == "0 running, 0 waiting, KV 0%, no KV transfer: the model keeps a state"
    assert row(WORKER, "active", (7,), says("ready"), "").no_transfer is None


@pytest.mark.parametrize(
    ("kv", "told"),
    [
        (KvWays(2, 0), ""),
        (KvWays(2, 3), ""),
        (KvWays(2, 0, 0, "closed network"), ""),
        (KvWays(2, 3, elsewhere=3), ", KV between machines: recomputed"),
        (KvWays(0, 0, 2, "closed network", 2), ", KV between machines: closed network"),
        (
            KvWays(0, 4, 2, "closed network", 5),
            ", KV between machines: closed network (that of 3 other workers: recomputed)",
        ),
    ],
)
def test_a_worker_says_how_kv_crosses_machines(kv: KvWays, told: str) -> None:
    engine = EngineInfo("vllm", "m", 1024, 16, 64, 8)
    presence = msgspec.structs.replace(says("ready"), engine=engine, load=Load(0, 0, 0.0), url=None)
    found = msgspec.structs.replace(row(WORKER, "active", (7,), presence, ""), kv=kv)
    assert _cells(found)[-1] == f"0 running, 0 waiting, KV 0%{told}"


def test_workers_of_endpoints_have_their_endpoint_and_come_after_the_graphs_own_by_revision() -> None:
    names = ["ns_chat@10_W", "ns_W", "ns_chat@2_W", "ns_chat@2_W_1", "ns_base@1_W"]
    found = [row(msgspec.structs.replace(WORKER, watcher_name=name), "active", (7,), None, "") for name in names]
    assert [(each.watcher, each.endpoint, each.revision) for each in in_order(found)] == [
        ("ns_W", "", ""),
        ("ns_base@1_W", "base", "base@1"),
        ("ns_chat@2_W", "chat", "chat@2"),
        ("ns_chat@2_W_1", "chat", "chat@2"),
        ("ns_chat@10_W", "chat", "chat@10"),
    ]


def test_an_endpoint_whose_processes_have_ended_has_no_row_and_a_service_of_the_graph_has_one() -> None:
    names = ["ns_W", "ns_chat@2_W"]
    found = [row(msgspec.structs.replace(TEMPLATE, watcher_name=name), None, (), None, "") for name in names]
    assert [(each.watcher, each.state) for each in in_order(found)] == [("ns_W", "stopped")]


def test_the_table_has_a_column_of_endpoints_only_if_there_are_any() -> None:
    own = row(WORKER, "active", (7,), says("ready"), "")
    chat = row(msgspec.structs.replace(WORKER, watcher_name="ns_chat@2_W"), "active", (7,), None, "")
    assert "ENDPOINT" not in as_table([own])
    header, first, second = (line.split() for line in as_table([own, chat]).splitlines())
    assert header[:3] == ["WATCHER", "ENDPOINT", "COMPONENT"]
    assert (first[:3], second[:3]) == (["W", "-", "W"], ["chat@2_W", "chat", "W"])
