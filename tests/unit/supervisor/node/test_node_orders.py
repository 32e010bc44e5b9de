from __future__ import annotations

import asyncio
import subprocess
import threading
from pathlib import Path

import msgspec
import pytest

from dynamo_local.bus.address import BusAddress
from dynamo_local.core.errors import ConfigError, DecodeError, UsageError
from dynamo_local.core.names import Watcher
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService
from dynamo_local.supervisor.node.agent import without_cluster
from dynamo_local.supervisor.node.head import REPLACED_S, HeadSilence, NodeOrder, gone, installed_versions
from dynamo_local.supervisor.node.places import NodePlans, forkserver_of
from dynamo_local.supervisor.places.far import HeadBeat
from dynamo_local.supervisor.server.launch.blueprint import Blueprint, BlueprintFile
from dynamo_local.supervisor.server.launch.templates import WatcherPlan
from state.devices.allocation import cpu_slots
from state.paths import STATE_DIR_VARIABLE, StatePaths

WATCHER = Watcher("dynamo", "VllmWorker", 3)
SLOTS = cpu_slots(range(4), 4)


def service(name: str, role: str, **config: object) -> ResolvedService:
    return ResolvedService(name, f"graph:{name}", role, 1, 1 if role == "decode" else 0, 0, {"KEEP": "me"}, config, ())


def graph(**config: object) -> ResolvedGraph:
    return ResolvedGraph(
        "graph:Frontend", "dynamo", (service("VllmWorker", "decode", **config), service("Frontend", "frontend"))
    )


def order(**changes: object) -> NodeOrder:
    whole = NodeOrder("dynamo", "n1", "id", BusAddress("nats://h:1", "t"), graph(), installed_versions(), 4, 60.0, 30.0)
    return msgspec.structs.replace(whole, **changes)


def plans(root: Path, **config: object) -> NodePlans:
    paths = StatePaths(root, "dynamo")
    paths.run_dir.mkdir(mode=0o700)
    paths.graph_file.write_bytes(graph(**config).to_json())
    file = BlueprintFile(paths)
    file.write(Blueprint("", "/", SLOTS, (), 60.0, 30.0))
    found = NodePlans("n1", paths, SLOTS, file)
    found.learn("main@1", graph(**config).to_json(), tuple)
    return found


def asked(watcher: Watcher = WATCHER) -> WatcherPlan:
    revision = watcher.revision or "main@1"
    return WatcherPlan(watcher, "decode", ("somewhere/python",), {STATE_DIR_VARIABLE: "/head"}, (2,), revision=revision)


def test_an_order_is_read_as_it_was_written() -> None:
    assert NodeOrder.decode(order().encode()) == order()


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", order().encode()[:-9]])
def test_garbage_is_no_order(data: bytes) -> None:
    with pytest.raises(DecodeError):
        NodeOrder.decode(data)


def test_names_in_an_order_are_checked() -> None:
    with pytest.raises(ConfigError):
        NodeOrder.decode(order(node="../n").encode())


def test_a_node_with_other_versions_is_refused_in_a_line() -> None:
    order().check_versions()
    with pytest.raises(ConfigError, match=r"^dynamo-local \S+ is installed, and the head has 0\.0\.0; install the"):
        order(versions={"dynamo-local": "0.0.0"}).check_versions()
    with pytest.raises(ConfigError, match=r"^Python 3\.\d+ is installed, and the head has 2\.7; install the same"):
        order(versions={"Python": "2.7"}).check_versions()
    with pytest.raises(ConfigError, match=r"^nosuch is not installed, and the head has 1; install the same"):
        order(versions={"nosuch": "1"}).check_versions()
    assert "Python" in order().versions


def test_a_node_plans_by_its_own_paths(tmp_path: Path) -> None:
    plan = plans(tmp_path).plan(asked())
    assert (plan.watcher, plan.devices) == (WATCHER, (2,))
    assert plan.environment[STATE_DIR_VARIABLE] == str(tmp_path)
    assert plan.environment["KEEP"] == "me"
    assert plan.environment["DYN_CPU_CORES"] == "2"
    assert "somewhere/python" not in plan.argv


def test_a_node_without_the_model_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="node n1 has no /models/x; have the model in the same folder"):
        plans(tmp_path, model="/models/x").plan(asked())


def test_mockers_need_no_model(tmp_path: Path) -> None:
    assert plans(tmp_path, model="/models/x", engine="mocker").plan(asked()).watcher == WATCHER


def test_the_graph_of_a_revision_is_learned(tmp_path: Path) -> None:
    found = plans(tmp_path)
    watcher = Watcher("dynamo", "VllmWorker", 0, "chat@2")
    with pytest.raises(UsageError, match="VllmWorker"):
        found.plan(asked(watcher))
    found.learn("chat@2", graph().to_json(), tuple)
    assert found.plan(asked(watcher)).watcher == watcher
    with pytest.raises(DecodeError):
        found.learn("chat@3", b"{}", tuple)


def test_revisions_without_workers_are_forgotten_with_the_next_one(tmp_path: Path) -> None:
    found = plans(tmp_path)
    for revision in ("chat@1", "code@1", "chat@2"):
        found.learn(revision, graph().to_json(), lambda: {"code@1", "main@1"})
    assert found.blueprint.revisions() == {"main@1", "code@1", "chat@2"}
    assert [found.paths.graph_of(revision).exists() for revision in ("chat@1", "code@1", "chat@2")] == [
        False,
        True,
        True,
    ]
    assert found.plan(asked()).watcher == WATCHER


def test_a_revision_that_is_learned_beside_another_one_is_not_forgotten(tmp_path: Path) -> None:
    """What is present was looked at before anything was reserved for it."""
    found, others = plans(tmp_path), list[threading.Thread]()

    def another_comes() -> tuple[str, ...]:
        others.append(threading.Thread(target=found.learn, args=("code@1", graph().to_json(), lambda: ("chat@1",))))
        others[0].start()
        others[0].join(0.2)
        return ()

    found.learn("chat@1", graph().to_json(), another_comes)
    others[0].join()
    assert found.blueprint.revisions() == {"chat@1", "code@1"}
    assert found.paths.graph_of("code@1").exists()


def test_a_node_has_a_fork_server_for_workers_of_the_graph_or_else_of_endpoints() -> None:
    def preloading(*pairs: tuple[str, str, str]) -> ResolvedGraph:
        services = (msgspec.structs.replace(service(name, role), preload=preload) for name, role, preload in pairs)
        return ResolvedGraph("graph:Frontend", "dynamo", tuple(services))

    frontend = ("Frontend", "frontend", "of.frontends")
    with_workers = forkserver_of(preloading(frontend, ("VllmWorker", "decode", "of.workers")), SLOTS, Path("/s"))
    assert with_workers is not None
    assert with_workers.argv[-1:] == ("of.workers",)
    alone = forkserver_of(preloading(frontend), SLOTS, Path("/s"))
    assert alone is not None
    assert alone.argv[-1:] == ("of.frontends",)


def test_what_a_cluster_sets_for_its_own_processes_is_not_for_workers() -> None:
    environ = {"RAY_X": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "CUDA_HOME": "/c", "PATH": "/bin"}
    assert without_cluster(environ) == {"CUDA_HOME": "/c", "PATH": "/bin"}


async def test_a_node_server_ends_when_its_head_is_silent() -> None:
    now = 0.0
    head = HeadSilence("id", silent_s=30.0, clock=lambda: now)
    now = 29.0
    assert head.reason is None
    await head.on_beat(HeadBeat("id"))
    now = 58.0
    assert head.reason is None
    now = 59.0
    assert head.reason == "nothing was heard of the server for 30 s"


async def test_a_node_server_ends_when_another_server_has_its_namespace() -> None:
    now = 0.0
    head = HeadSilence("id", clock=lambda: now)
    await head.on_beat(HeadBeat("id"))
    now = REPLACED_S
    await head.on_beat(HeadBeat("another"))
    await head.on_beat(HeadBeat("id"))
    assert "another server" in str(head.reason)


async def test_a_beat_of_a_former_head_that_comes_late_ends_nothing() -> None:
    head = HeadSilence("id", clock=lambda: 0.0)
    await head.on_beat(HeadBeat("id"))
    await head.on_beat(HeadBeat("former"))
    assert head.reason is None


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_the_end_of_a_process_is_seen_although_nobody_reaps_it() -> None:
    process = await asyncio.to_thread(subprocess.Popen, ["sleep", "600"])
    watching = asyncio.create_task(gone(process.pid))
    await asyncio.sleep(0)
    process.kill()
    async with asyncio.timeout(60):
        assert "is gone" in await watching
        # It is a zombie still.
        assert state_of(process.pid) == "Z"
        await gone(process.pid)
    await asyncio.to_thread(process.wait)
