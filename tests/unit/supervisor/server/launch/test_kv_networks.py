"""The network for KV, as it is given to `dynamo serve`."""

from __future__ import annotations

from ipaddress import IPv4Address
from typing import Any

import pytest

from dynamo_local.core.errors import UsageError
from dynamo_local.core.messages.kv import TLS_STREAM
from dynamo_local.engine.kv.network import NO_FAR_KV, FarKv, NetworkSettings, far_kv_here
from dynamo_local.sdk.config.flags import kv_network_flag, kv_stream_flag, overrides_of
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService
from dynamo_local.sdk.graph import load_graph
from dynamo_local.sdk.service import spec_of
from dynamo_local.supervisor.server.launch import kv_networks
from dynamo_local.supervisor.server.launch.kv_networks import check_kv_networks
from state.machine import interfaces

ELSEWHERE = "198.51.100.0/24"
HERE = "10.1.2.0/24"


@pytest.fixture(autouse=True)
def _interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has an address in `HERE`, whatever interfaces there are."""
    found = {"eth0": IPv4Address("10.1.2.3")}
    for module in (interfaces, kv_networks):
        monkeypatch.setattr(module, "interfaces", lambda: found)


def graph(config: dict[str, Any]) -> ResolvedGraph:
    service = ResolvedService("VllmWorker", "components:VllmWorker", "decode", 1, 0, 0.0, {}, config, ())
    return ResolvedGraph(service.target, "ns", (service,))


@pytest.mark.parametrize("cidr", ["10.0.0.0/33", "10.0.0.1/8", "fd00::/64", "nonsense"])
def test_what_is_no_network_is_refused(cidr: str) -> None:
    for here in (True, False):
        with pytest.raises(UsageError) as caught:
            check_kv_networks(graph({"kv-network": cidr}), here=here)
        assert "\n" not in str(caught.value)
        assert repr(cidr) in caught.value.cause
    with pytest.raises(ValueError, match="kv-network must be an IPv4 network"):
        NetworkSettings(cidr)


def test_a_network_that_this_machine_is_not_in_is_refused_unless_workers_are_elsewhere() -> None:
    with pytest.raises(UsageError) as caught:
        check_kv_networks(graph({"kv-network": ELSEWHERE}), here=True)
    assert ELSEWHERE in caught.value.cause
    assert "10.1.2.3 (eth0)" in str(caught.value.remedy)
    check_kv_networks(graph({"kv-network": ELSEWHERE}), here=False)
    check_kv_networks(graph({"kv-network": HERE}), here=True)
    check_kv_networks(graph({}), here=True)
    with pytest.raises(UsageError):
        check_kv_networks(graph({"kv-network": "127.0.0.0/8"}), here=True)


def test_the_option_is_for_workers() -> None:
    services = load_graph("examples.llm.graphs.disagg:Frontend").services
    found = list(overrides_of([spec_of(service) for service in services], kv_network_flag(ELSEWHERE)))
    assert {each.section for each in found} == {"VllmWorker", "PrefillWorker"}
    assert {(each.path, each.text) for each in found} == {(("kv-network",), ELSEWHERE)}
    assert kv_network_flag(None) == ()
    (stream,) = kv_stream_flag(given=True)
    assert {each.section for each in overrides_of([spec_of(each) for each in services], (stream,))} == {
        "VllmWorker",
        "PrefillWorker",
    }
    assert kv_stream_flag(given=False) == ()


def test_a_worker_goes_by_the_interface_that_its_machine_has(caplog: pytest.LogCaptureFixture) -> None:
    assert far_kv_here(NetworkSettings(HERE)) == FarKv(HERE, "eth0")
    assert far_kv_here(NetworkSettings(), bus_host="10.1.2.3") == NO_FAR_KV
    assert not caplog.text
    assert far_kv_here(NetworkSettings(ELSEWHERE)) == NO_FAR_KV
    assert far_kv_here(NetworkSettings(HERE), no_port="there are other users") == NO_FAR_KV
    assert "no interface has its address" in caplog.text
    assert "there are other users" in caplog.text


def test_a_stream_goes_where_the_bus_is_on_tls(caplog: pytest.LogCaptureFixture) -> None:
    stream = NetworkSettings(kv_stream=True)
    # A stream knows who reads, other users of the machine do not.
    assert far_kv_here(stream, bus_host="10.1.2.3", no_port="there are other users") == FarKv(
        TLS_STREAM, host="10.1.2.3"
    )
    assert not caplog.text
    assert far_kv_here(stream) == NO_FAR_KV
    assert far_kv_here(stream, bus_host="10.1.2.3", no_stream="it is on a GPU") == NO_FAR_KV
    assert "the bus is not on TLS" in caplog.text
    assert "it is on a GPU" in caplog.text
    with pytest.raises(ValueError, match="exclude each other"):
        NetworkSettings(HERE, kv_stream=True)
