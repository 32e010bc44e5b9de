from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dynamo_local.core.errors import ConfigError, DeviceError
from dynamo_local.core.fleet.view import FRONTEND_ROLE
from dynamo_local.core.names import HTTP_PORT_ENV
from dynamo_local.process.listener import LISTENER_ENV
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService
from dynamo_local.supervisor.circus.drain import waves
from dynamo_local.supervisor.server.launch.plan import (
    HttpAddress,
    main_on_board,
    plan_forkserver,
    plan_services,
    revision_templates,
    service_templates,
    stop_order,
)
from dynamo_local.supervisor.server.launch.request import without_preloads
from dynamo_local.supervisor.server.launch.templates import ENDPOINT_WORKERS, WatcherPlan
from state.devices.allocation import Device, Inventory, cpu_slots

HTTP = HttpAddress("127.0.0.1", 8000)
ROOT = Path("/state")


def service(name: str, workers: int = 1, gpu: float = 0, **envs: str) -> ResolvedService:
    return ResolvedService(name, f"m:{name}", "service", workers, gpu, 0, envs, {}, ())


def graph(*services: ResolvedService) -> ResolvedGraph:
    return ResolvedGraph("m:Front", "ns", services)


def plan(slots: int, *services: ResolvedService) -> tuple[WatcherPlan, ...]:
    return planned(graph(*services), cpu_slots(range(8), slots))


def names(graph: ResolvedGraph) -> frozenset[str]:
    return frozenset(service.name for service in graph.services)


def planned(graph: ResolvedGraph, inventory: Inventory) -> tuple[WatcherPlan, ...]:
    return plan_services(graph.namespace, service_templates(graph, ROOT, HTTP), inventory)


def test_every_worker_is_a_watcher_of_its_own_with_devices_of_its_own() -> None:
    plans = plan(4, service("Worker", workers=3, gpu=1), service("Front"))
    assert [(p.name, p.devices) for p in plans] == [
        ("ns_Worker", (0,)),
        ("ns_Worker_1", (1,)),
        ("ns_Worker_2", (2,)),
        ("ns_Front", ()),
    ]


def test_frontends_share_the_socket_that_the_server_hands_over() -> None:
    front = msgspec.structs.replace(service("Front", workers=3), role=FRONTEND_ROLE)
    shared = HttpAddress("127.0.0.1", 8000, "a name")
    templates = service_templates(graph(front), ROOT, shared)
    plans = plan_services("ns", templates, cpu_slots(range(8), 1))
    assert [plan.name for plan in plans] == ["ns_Front", "ns_Front_1", "ns_Front_2"]
    assert {plan.environment[LISTENER_ENV] for plan in plans} == {"a name"}


@pytest.mark.parametrize(
    ("root", "http", "says"),
    [
        # It binds the address for itself.
        (service("Front", workers=2), HttpAddress("127.0.0.1", 8000, "a name"), "to 1"),
        (msgspec.structs.replace(service("Front", workers=2), role=FRONTEND_ROLE), HTTP, "to 1"),
        (
            msgspec.structs.replace(service("Front", workers=33), role=FRONTEND_ROLE),
            HttpAddress("127.0.0.1", 8000, "a name"),
            "from 1 to 32",
        ),
    ],
)
def test_a_root_that_cannot_share_its_port_is_one_process(root: ResolvedService, http: HttpAddress, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        service_templates(graph(root), ROOT, http)


def test_a_process_is_told_who_it_is_and_what_it_holds() -> None:
    (worker, front) = plan(4, service("Worker", gpu=1, HF_HOME="/models"), service("Front"))
    assert worker.environment["DYN_WATCHER"] == "ns_Worker"
    assert worker.environment["DYN_NAMESPACE"] == "ns"
    assert worker.environment["DYN_LOCAL_STATE_DIR"] == "/state"
    assert worker.environment["DYN_CPU_CORES"] == "0,1"
    assert worker.environment["HF_HOME"] == "/models"
    assert worker.argv[-4:] == ("--namespace", "ns", "--service", "Worker")
    assert "DYN_CPU_CORES" not in front.environment
    assert "HF_HOME" not in front.environment


def test_a_worker_has_a_thread_for_each_core_unless_its_settings_say_otherwise() -> None:
    (worker,) = plan(4, service("Worker", gpu=1))
    assert worker.environment["OMP_NUM_THREADS"] == "2"
    (worker,) = plan(4, service("Worker", gpu=1, OMP_NUM_THREADS="7"))
    assert worker.environment["OMP_NUM_THREADS"] == "7"


def test_only_the_root_is_told_the_address_to_listen_on() -> None:
    (worker, front) = plan(4, service("Worker"), service("Front"))
    assert (front.environment["DYN_HTTP_HOST"], front.environment["DYN_HTTP_PORT"]) == ("127.0.0.1", "8000")
    assert "DYN_HTTP_PORT" not in worker.environment


def test_a_service_cannot_take_the_place_of_another_by_its_settings() -> None:
    (front,) = plan(1, service("Front", DYN_WATCHER="ns_Nats", CUDA_VISIBLE_DEVICES="0,1"))
    assert front.environment["DYN_WATCHER"] == "ns_Front"
    assert front.environment["CUDA_VISIBLE_DEVICES"] == ""


def test_gpus_are_named_to_cuda() -> None:
    gpus = Inventory("gpu", (Device(1, "gpu", "A", uuid="u1"), Device(3, "gpu", "A", uuid="u3")))
    (worker, front) = planned(graph(service("Worker", gpu=2), service("Front")), gpus)
    assert worker.environment["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert front.environment["CUDA_VISIBLE_DEVICES"] == ""


def test_too_few_devices_name_the_worker() -> None:
    with pytest.raises(DeviceError, match=r"worker 2 of 2 of Worker needs 2 devices, 1 of 3 CPU slots is free"):
        plan(3, service("Worker", workers=2, gpu=2), service("Front"))


def test_services_that_circus_cannot_tell_apart_are_refused() -> None:
    with pytest.raises(ConfigError, match="AbC and ABC differ in upper and lower case only"):
        plan(1, service("AbC"), service("ABC"), service("Front"))


def test_the_root_has_the_port_to_itself() -> None:
    with pytest.raises(ConfigError, match="Front listens on the one port"):
        plan(1, service("Front", workers=2))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=5))
def test_no_plan_gives_a_device_twice_or_fewer_than_asked_for(shape: list[tuple[int, int]]) -> None:
    services = [service(f"S{i}", workers, gpu) for i, (workers, gpu) in enumerate(shape)]
    total = sum(workers * gpu for workers, gpu in shape)
    plans = plan(max(total, 1), *services, service("Front"))
    held = [device for p in plans for device in p.devices]
    assert len(held) == len(set(held)) == total
    asked = {s.name: s.gpu for s in services}
    assert all(len(p.devices) == asked.get(p.watcher.service, 0) for p in plans)


def test_devices_that_others_hold_are_not_handed_out_but_to_those_who_compute_nothing() -> None:
    gpus = Inventory("gpu", tuple(Device(i, "gpu", "H100", uuid=f"GPU-{i}") for i in range(3)))
    mocking = msgspec.structs.replace(service("Mocker", gpu=1), virtual=True)
    resolved = graph(mocking, service("Worker", gpu=1), service("Front"))
    templates = service_templates(resolved, ROOT, HTTP)
    others = {0: "somebody", 1: "somebody"}
    mocker, worker, front = plan_services("ns", templates, gpus, others)
    assert (mocker.devices, worker.devices) == ((0,), (2,))
    assert worker.environment["DYN_DEVICES"] == "GPU-2"
    assert mocker.environment["DYN_DEVICES"] == front.environment["DYN_DEVICES"] == ""
    with pytest.raises(DeviceError, match="0 of 3 GPUs are free; GPU 1 is held by somebody; GPU 2 is held by me;"):
        plan_services("ns", templates, gpus, others | {2: "me"})


def test_services_with_something_to_import_are_started_through_the_launcher_and_share_one_forkserver() -> None:
    preloading = msgspec.structs.replace(service("Worker", workers=2, gpu=1), preload="big.one")
    fronting = msgspec.structs.replace(service("Front"), preload="big.one")
    resolved = graph(preloading, service("Router"), fronting)
    slots = cpu_slots(range(8), 4)
    plans = plan_services("ns", service_templates(resolved, ROOT, HTTP), slots)
    commands = {p.name: p.argv[2] for p in plans}
    launcher, host = "dynamo_local.process.forkserver.launcher", "dynamo_local.process.main"
    assert commands == {"ns_Worker": launcher, "ns_Worker_1": launcher, "ns_Router": host, "ns_Front": launcher}
    forkserver = plan_forkserver(resolved, slots, ROOT, names(resolved))
    assert forkserver is not None
    assert forkserver.argv[2:] == ("dynamo_local.process.forkserver", "--namespace", "ns", "big.one")
    assert forkserver.environment["DYN_WATCHER"] == "ns_ForkServer"
    assert forkserver.environment["CUDA_VISIBLE_DEVICES"] == ""
    assert plan_forkserver(graph(service("Router")), slots, ROOT, {"Router"}) is None
    assert plan_forkserver(without_preloads(resolved), slots, ROOT, names(resolved)) is None


def test_gpus_are_hidden_from_forks_only() -> None:
    gpus = Inventory("gpu", (Device(0, "gpu", "one", uuid="u"),))
    forkserver = plan_forkserver(
        graph(msgspec.structs.replace(service("Front"), preload="big.one")), gpus, ROOT, {"Front"}
    )
    assert forkserver is not None
    assert "CUDA_VISIBLE_DEVICES" not in forkserver.environment


def test_who_is_depended_on_stops_later_and_the_bus_last() -> None:
    depends = {"Worker": (), "Prefill": (), "Router": ("Worker", "Prefill"), "Front": ("Router", "Worker")}
    services = (msgspec.structs.replace(service(name), depends_on=names) for name, names in depends.items())
    assert [set(names) for names in stop_order(graph(*services))] == [
        {"Front"},
        {ENDPOINT_WORKERS},
        {"Router"},
        {"Worker", "Prefill"},
        {"ForkServer"},
        {"Nats"},
    ]


def test_waves_hold_what_stops_together_and_strangers_go_first() -> None:
    watchers = ["ns_Nats", "ns_Worker", "ns_Front", "ns_Worker_10", "ns_Planner", "ns_Prefill"]
    assert waves(watchers, ({"Front"}, {"Worker", "Prefill"}, {"Nats"})) == [
        ["ns_Planner"],
        ["ns_Front"],
        ["ns_Prefill", "ns_Worker", "ns_Worker_10"],
        ["ns_Nats"],
    ]


def test_an_ipv6_host_makes_a_url() -> None:
    assert HttpAddress("::1", 80).url == "http://[::1]:80"


def test_plans_do_not_change_the_graph() -> None:
    before = graph(service("Front", A="1"))
    copy = msgspec.structs.replace(before)
    planned(before, cpu_slots((0,), 1))
    assert before == copy
    assert before.root.envs == {"A": "1"}


def test_workers_of_endpoints_stop_after_the_root_and_before_what_they_talk_through() -> None:
    door = (msgspec.structs.replace(service("Front"), depends_on=("Router",)), service("Router"))
    watchers = ["ns_Nats", "ns_Router", "ns_chat@2_VllmWorker", "ns_Front", "ns_chat@2_Front", "ns_ForkServer"]
    assert waves(watchers, stop_order(graph(*door))) == [
        ["ns_Front"],
        ["ns_chat@2_Front", "ns_chat@2_VllmWorker"],
        ["ns_Router"],
        ["ns_ForkServer"],
        ["ns_Nats"],
    ]


def test_of_a_revision_the_workers_alone_are_started_and_listen_on_no_port() -> None:
    roles = {"Worker": "decode", "Prefill": "prefill", "Router": "router", "Front": "frontend"}
    services = [msgspec.structs.replace(service(name, gpu=1), role=role) for name, role in roles.items()]
    templates = revision_templates(graph(*services), "chat@2", ROOT)
    assert [(one.service, one.role, one.revision) for one in templates] == [
        ("Worker", "decode", "chat@2"),
        ("Prefill", "prefill", "chat@2"),
    ]
    assert not any(HTTP_PORT_ENV in one.environment for one in templates)
    (started,) = plan_services("ns", templates[:1], cpu_slots(range(8), 4))
    assert (started.name, started.environment["DYN_WATCHER"]) == ("ns_chat@2_Worker",) * 2
    # A worker whose graph is rooted in itself has no port either: the frontend is the server's.
    alone = ResolvedGraph("m:Worker", "ns", (services[0],))
    assert HTTP_PORT_ENV not in revision_templates(alone, "chat@2", ROOT)[0].environment


MIXED = (service("Small", workers=3, gpu=0.5), service("Large", gpu=1), service("Tiny", gpu=0.3))


def test_whole_devices_are_given_out_first_then_the_largest_shares() -> None:
    assert [(p.name, p.devices, p.share) for p in plan(3, *MIXED)] == [
        ("ns_Small", (1,), 0.5),
        ("ns_Small_1", (1,), 0.5),
        ("ns_Small_2", (2,), 0.5),
        ("ns_Large", (0,), 1.0),
        ("ns_Tiny", (2,), 0.3),
    ]
    with pytest.raises(DeviceError, match=r"worker 3 of 3 of Small needs 0\.5 of a device, no CPU slot of 2 has"):
        plan(2, *MIXED)


def test_a_worker_with_a_share_is_told_so_and_has_its_part_of_the_threads() -> None:
    (worker,) = plan(2, service("Worker", gpu=0.5))
    assert worker.environment["DYN_CPU_CORES"] == "0,1,2,3"
    assert (worker.environment["DYN_DEVICE_SHARE"], worker.environment["OMP_NUM_THREADS"]) == ("0.5", "2")
    (worker,) = plan(2, service("Worker", gpu=1))
    assert (worker.environment["DYN_DEVICE_SHARE"], worker.environment["OMP_NUM_THREADS"]) == ("", "4")


def test_two_workers_on_one_gpu_both_see_it_and_no_other() -> None:
    gpus = Inventory("gpu", tuple(Device(i, "gpu", "A GPU", uuid=f"GPU-{i}") for i in range(2)))
    plans = planned(graph(service("Worker", workers=2, gpu=0.5), service("Front")), gpus)[:2]
    assert [(p.environment["CUDA_VISIBLE_DEVICES"], p.environment["DYN_DEVICES"]) for p in plans] == [
        ("0", "GPU-0"),
        ("0", "GPU-0"),
    ]


def test_the_model_of_a_graph_with_workers_has_the_names_that_its_frontend_serves() -> None:
    worker, root = replace(service("W"), role="decode"), replace(service("Front"), config={"model": "embedding"})
    frontend = replace(service("Frontend"), role="frontend", config={"model": "/m", "served-model-name": ["m", "n"]})
    (listed,) = main_on_board(graph(worker, frontend, root))
    assert (listed.revision, listed.takes_requests, listed.served_names) == ("main@1", True, ("m", "n"))
    (listed,) = main_on_board(graph(worker, replace(frontend, config={"model": "/m"}), root))
    assert listed.served_names == ("/m",)
    # Its workers are there, whatever it is called.
    assert [each.served_names for each in main_on_board(graph(worker, root))] == [()]
    assert main_on_board(graph(frontend, root)) == ()
