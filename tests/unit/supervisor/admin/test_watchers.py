"""The state of each watcher, and the workers that `dynamo role` asks or refuses."""

from __future__ import annotations

import msgspec
import pytest

from dynamo_local.cli.look import _ps_cells, table_of_processes
from dynamo_local.control.answers import WatcherRow
from dynamo_local.core.errors import UsageError
from dynamo_local.core.messages.kv import KvWays
from dynamo_local.core.messages.presence import EngineInfo, Load, Presence, ProcessState
from dynamo_local.core.names import parse_watcher
from dynamo_local.supervisor.admin.watchers import in_order, row, worker_to_ask
from state.statefile.model import Component, Resources

WORKER = Component("ns_W", "W", "decode", "cmd", Resources((1,)), lease="l", pid=7)
LEAVES = msgspec.structs.replace(WORKER, phase="retiring")
COMES = msgspec.structs.replace(WORKER, phase="starting")
AWAY = "the bus does not answer"
TEMPLATE = Component("ns_W", "W", "decode", "cmd")
BUS = Component("ns_Nats", "Nats", "bus", "cmd", Resources(()))
FORKSERVER = Component("ns_ForkServer", "ForkServer", "forkserver", "cmd", Resources(()))


def of_revision(component: Component, watcher: str) -> Component:
    revision = parse_watcher(watcher).revision or "main@1"
    return msgspec.structs.replace(component, watcher_name=watcher, revision=revision)


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
    assert _ps_cells(found)[-1] == "0 running, 0 waiting, KV 0%, no KV transfer: the model keeps a state"
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
    assert _ps_cells(found)[-1] == f"0 running, 0 waiting, KV 0%{told}"


def test_workers_of_endpoints_have_their_endpoint_and_come_after_the_graphs_own_by_revision() -> None:
    names = ["ns_chat@10_W", "ns_W", "ns_chat@2_W", "ns_chat@2_W_1", "ns_base@1_W"]
    found = [row(of_revision(WORKER, name), "active", (7,), None, "") for name in names]
    assert [(each.watcher, each.endpoint, each.revision) for each in in_order(found)] == [
        ("ns_W", "main", "main@1"),
        ("ns_base@1_W", "base", "base@1"),
        ("ns_chat@2_W", "chat", "chat@2"),
        ("ns_chat@2_W_1", "chat", "chat@2"),
        ("ns_chat@10_W", "chat", "chat@10"),
    ]


def test_an_endpoint_whose_processes_have_ended_has_no_row_and_a_service_of_the_graph_has_one() -> None:
    names = ["ns_W", "ns_chat@2_W"]
    found = [row(of_revision(TEMPLATE, name), None, (), None, "") for name in names]
    assert [(each.watcher, each.state) for each in in_order(found)] == [("ns_W", "stopped")]


def test_the_table_has_a_column_of_endpoints_only_if_there_are_any() -> None:
    own = row(WORKER, "active", (7,), says("ready"), "")
    chat = row(of_revision(WORKER, "ns_chat@2_W"), "active", (7,), None, "")
    assert "ENDPOINT" not in table_of_processes([own])
    header, first, second = (line.split() for line in table_of_processes([own, chat]).splitlines())
    assert header[:3] == ["WATCHER", "ENDPOINT", "COMPONENT"]
    assert (first[:3], second[:3]) == (["W", "-", "W"], ["chat@2_W", "chat", "W"])


def of(watcher: str, role: str, state: str = "ready", lease: str | None = "lease") -> WatcherRow:
    lease = None if lease is None else f"{lease} of {watcher}"
    revision = parse_watcher(watcher).revision
    return WatcherRow(
        watcher=watcher, component="W", role=role, revision=revision, pid=1, devices=(), state=state, lease=lease
    )


PAIR = [of("n_Front", "frontend"), of("n_W", "decode"), of("n_P", "prefill")]


@pytest.mark.parametrize(("watcher", "role"), [("n_P", "decode"), ("n_P", "prefill"), ("n_W", "decode")], ids=str)
def test_a_ready_worker_is_asked(watcher: str, role: str) -> None:
    assert worker_to_ask(PAIR, watcher, role).lease == f"lease of {watcher}"
    assert worker_to_ask(PAIR, watcher.removeprefix("n_"), role).lease == f"lease of {watcher}"


def test_the_only_one_that_decodes_is_asked_only_with_force() -> None:
    with pytest.raises(UsageError, match=r"n_W is the only one that decodes; .*--force"):
        worker_to_ask(PAIR, "n_W", "prefill")
    with pytest.raises(UsageError, match="W is the only one that decodes"):
        worker_to_ask(PAIR, "W", "prefill")
    assert worker_to_ask(PAIR, "n_W", "prefill", even_the_last=True).lease == "lease of n_W"


@pytest.mark.parametrize(("state", "asked"), [("ready", True), ("starting", False), ("ended", False)])
def test_another_one_must_be_ready_to_take_its_place(state: str, asked: bool) -> None:
    found = [*PAIR, of("n_W_1", "decode", state)]
    if asked:
        assert worker_to_ask(found, "n_W", "prefill").lease == "lease of n_W"
    else:
        with pytest.raises(UsageError, match="only one"):
            worker_to_ask(found, "n_W", "prefill")


def test_a_worker_of_another_model_does_not_take_its_place() -> None:
    chat = [of("n_chat@2_W", "decode"), of("n_chat@2_P", "prefill")]
    with pytest.raises(UsageError, match="W is the only one that decodes"):
        worker_to_ask([*PAIR, *chat], "chat@2_W", "prefill")
    third = of("n_chat@2_W_1", "decode")
    assert worker_to_ask([*PAIR, *chat, third], "chat@2_W", "prefill").revision == "chat@2"


@pytest.mark.parametrize("watcher", ["n_Front", "Front", "", "n_W_7"])
def test_who_is_no_worker_is_not_asked_and_the_workers_are_named(watcher: str) -> None:
    with pytest.raises(UsageError, match="there are: W, P"):
        worker_to_ask(PAIR, watcher, "prefill")


@pytest.mark.parametrize(("state", "lease"), [("starting", "l"), ("draining", "l"), ("ended", None), ("ready", None)])
def test_who_is_not_ready_is_not_asked(state: str, lease: str | None) -> None:
    with pytest.raises(UsageError, match=f"n_P_1 is not ready but {state}"):
        worker_to_ask([*PAIR, of("n_P_1", "prefill", state, lease)], "n_P_1", "decode")


def test_in_a_graph_without_prefill_workers_there_is_nothing_to_choose() -> None:
    with pytest.raises(UsageError, match="no prefill workers"):
        worker_to_ask([of("n_Front", "frontend"), of("n_W", "aggregated")], "n_W", "prefill")
