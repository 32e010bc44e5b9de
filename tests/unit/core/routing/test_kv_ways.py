"""How KV gets from one worker to another."""

from __future__ import annotations

from dynamo_local.core.messages.kv import TLS_STREAM, KvWays
from dynamo_local.core.messages.presence import EngineInfo, Presence
from dynamo_local.core.routing.pulling import ways_of_kv


def worker(
    name: str,
    machine: str,
    *,
    no_transfer: str | None = None,
    role: str = "decode",
    network: str = "",
    revision: str = "main@1",
) -> Presence:
    engine = EngineInfo("mocker", "m", 1024, 16, 64, 8, no_transfer=no_transfer, kv_network=network)
    return Presence(f"ns_{name}", name, role, name, 1, "ready", engine=engine, machine=machine, revision=revision)


def test_kv_is_read_on_one_machine_and_computed_anew_on_another() -> None:
    found = ways_of_kv([worker("A", "here"), worker("B", "here", role="prefill"), worker("C", "there")])
    assert found == {
        "ns_A": KvWays(1, 1, elsewhere=1),
        "ns_B": KvWays(1, 1, elsewhere=1),
        "ns_C": KvWays(0, 2, elsewhere=2),
    }


def test_on_streams_kv_is_read_between_machines_by_tls() -> None:
    found = ways_of_kv([worker("A", "here", network=TLS_STREAM), worker("B", "there", network=TLS_STREAM)])
    assert found["ns_A"] == found["ns_B"] == KvWays(0, 0, 1, "TLS", 1)


def test_a_machine_that_is_not_known_is_shared_with_nobody() -> None:
    assert ways_of_kv([worker("A", ""), worker("B", "")])["ns_A"] == KvWays(0, 1, elsewhere=1)


def test_an_engine_that_transfers_nothing_is_read_by_nobody() -> None:
    found = ways_of_kv([worker("A", "here", no_transfer="no room"), worker("B", "here"), worker("C", "here")])
    assert found == {"ns_A": KvWays(0, 2), "ns_B": KvWays(1, 1), "ns_C": KvWays(1, 1)}


def test_other_models_and_processes_are_not_counted() -> None:
    one, other = worker("A", "here"), worker("chat@2_A", "here", revision="chat@2")
    frontend = worker("Frontend", "here", role="frontend")
    assert ways_of_kv([one, other, frontend]) == {one.watcher: KvWays(0, 0), other.watcher: KvWays(0, 0)}


def test_in_a_closed_network_kv_is_read_between_machines() -> None:
    net = "10.1.2.0/24"
    found = ways_of_kv(
        [
            worker("A", "here", network=net),
            worker("B", "here", network=net),
            worker("C", "there", network=net),
            worker("D", "elsewhere"),
            worker("E", "far", network="10.9.9.0/24"),
            worker("F", "there", network=net, no_transfer="no room"),
        ]
    )
    assert found["ns_A"] == found["ns_B"] == KvWays(1, 3, 1, "closed network", 4)
    assert found["ns_C"] == KvWays(0, 3, 2, "closed network", 4)
    assert found["ns_D"] == KvWays(0, 5, elsewhere=5)
    assert found["ns_E"] == KvWays(0, 5, 0, "closed network", 5)
    assert found["ns_F"] == KvWays(0, 5, elsewhere=4)


def test_a_machine_that_is_not_known_is_in_no_network() -> None:
    net = "10.1.2.0/24"
    assert ways_of_kv([worker("A", "", network=net), worker("B", "b", network=net)])["ns_B"].network == 0


def test_on_one_machine_a_worker_in_a_network_and_one_in_none_do_not_read_each_other() -> None:
    """Their fingerprints differ: one goes by the contents of the model's files, the other by their times."""
    net = "10.1.2.0/24"
    found = ways_of_kv([worker("A", "here", network=net), worker("B", "here"), worker("C", "here")])
    assert found == {"ns_A": KvWays(0, 2, 0, "closed network"), "ns_B": KvWays(1, 1), "ns_C": KvWays(1, 1)}
