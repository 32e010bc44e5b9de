"""Which NATS a server uses, and where its own one listens."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.certificate import make_certificate
from dynamo_local.core.errors import PortInUseError, UsageError
from dynamo_local.core.messages.kv import TLS_STREAM
from dynamo_local.engine.kv.network import NO_FAR_KV, FarKv, NetworkSettings, far_kv_here
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService
from dynamo_local.sdk.config.sections import overrides_of
from dynamo_local.sdk.graph import load_graph
from dynamo_local.sdk.service import spec_of
from dynamo_local.supervisor.server.launch import addresses
from dynamo_local.supervisor.server.launch.addresses import (
    answers,
    bus_of,
    check_kv_networks,
    claim_address,
    external_bus,
)
from dynamo_local.supervisor.server.launch.request import ServeRequest
from state.machine import interfaces


@pytest.mark.parametrize(
    ("url", "environ", "expected"),
    [
        (None, {}, None),
        (None, {"NATS_SERVER": ""}, None),
        ("nats://host:4333", {}, BusAddress("nats://host:4333")),
        ("host", {}, BusAddress("nats://host")),
        (None, {"NATS_SERVER": "nats://host:1"}, BusAddress("nats://host:1")),
        ("nats://typed:1", {"NATS_SERVER": "nats://environment:1"}, BusAddress("nats://typed:1")),
        ("nats://host:1", {"NATS_TOKEN": "t"}, BusAddress("nats://host:1", "t")),
        ("nats://s3c%2Fret@host", {"NATS_TOKEN": "other"}, BusAddress("nats://host:4222", "s3c/ret")),
        ("tls://t@[::1]:5", {}, BusAddress("tls://[::1]:5", "t")),
        ("nats://user:pass@host:1", {}, BusAddress("nats://user:pass@host:1")),
        ("nats://a:1, b", {"NATS_TOKEN": "t"}, BusAddress("nats://a:1,nats://b", "t")),
        ("tls://t@a:1,tls://b:2", {}, BusAddress("tls://a:1,tls://b:2", "t")),
    ],
)
def test_an_existing_server_is_found_with_its_secret(
    url: str | None, environ: dict[str, str], expected: BusAddress | None
) -> None:
    assert external_bus(url, environ) == expected


@pytest.mark.parametrize("url", ["http://host", "nats://", "nats://host:port", "nats://secret@host:99999"])
def test_what_is_no_address_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        external_bus(url, {})
    assert "secret" not in str(caught.value)


def test_a_shown_address_has_no_secret() -> None:
    assert BusAddress("nats://user:p@ss@host:1,tls://t@other:2").shown == "nats://host:1,tls://other:2"


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    path = tmp_path / "ca.pem"
    path.write_text(make_certificate("host").authority)
    return path


def test_the_authority_comes_from_a_file(ca: Path) -> None:
    expected = BusAddress("tls://host:1", "t", ca=ca.read_text())
    assert external_bus("tls://t@host:1", {}, ca) == expected
    assert external_bus("tls://t@host:1", {"NATS_CA": str(ca)}) == expected


def test_what_is_no_authority_is_refused(ca: Path, tmp_path: Path) -> None:
    for contents in (b"", b"\xff", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"):
        ca.write_bytes(contents)
        with pytest.raises(UsageError, match="no certificate authority in PEM"):
            external_bus("tls://host:1", {}, ca)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        external_bus("tls://host:1", {}, tmp_path / "absent.pem")


@pytest.mark.parametrize(
    ("url", "with_ca", "host", "cause"),
    [
        ("nats://host:1", True, None, "without TLS; write its address as tls://HOST:PORT"),
        (None, True, None, "none is named; add --nats-url"),
        ("nats://host:1", False, "127.0.0.2", "leave one of them out"),
        (None, False, "192.0.2.1", "no address of this machine"),
        (None, False, "0.0.0.0", "other machines cannot connect to 0.0.0.0"),
        (None, False, "::", "other machines cannot connect to ::"),
        (None, False, "no such host", "no address and no known name"),
        (None, False, "", "no address and no known name"),
    ],
)
def test_what_does_not_fit_is_one_line(ca: Path, url: str | None, with_ca: bool, host: str | None, cause: str) -> None:
    with pytest.raises(UsageError) as caught:
        bus_of(url, ca if with_ca else None, host, {})
    assert cause in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_server_has_its_own_on_loopback_or_where_it_is_told() -> None:
    assert bus_of(None, None, None, {}) == (None, "127.0.0.1")
    assert bus_of(None, None, "127.0.0.2", {}) == (None, "127.0.0.2")


def test_port_0_becomes_a_free_port_on_which_nobody_answers() -> None:
    address = claim_address("127.0.0.1", 0)
    assert address.port > 0
    assert not answers(address)
    assert claim_address("127.0.0.1", address.port) == address


def test_a_taken_port_is_refused_and_answers() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"port {port} on 127.0.0.1 is in use"):
            claim_address("127.0.0.1", port)
        with pytest.raises(PortInUseError):
            claim_address("0.0.0.0", port)


def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(UsageError, match=r"cannot listen on 203\.0\.113\.1:8000"):
        claim_address("203.0.113.1", 8000)


# The network for KV, as it is given to `dynamo serve`.

ELSEWHERE = "198.51.100.0/24"
HERE = "10.1.2.0/24"


@pytest.fixture(autouse=True)
def _interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has an address in `HERE`, whatever interfaces there are."""
    found = {"eth0": IPv4Address("10.1.2.3")}
    for module in (interfaces, addresses):
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
    for request, given in (
        (ServeRequest(None, kv_network=ELSEWHERE), (("kv-network",), ELSEWHERE)),
        (ServeRequest(None, kv_stream=True), (("kv-stream",), "true")),
    ):
        found = list(overrides_of([spec_of(service) for service in services], request.kv_flags))
        assert {each.section for each in found} == {"VllmWorker", "PrefillWorker"}
        assert {(each.path, each.text) for each in found} == {given}
    assert ServeRequest(None).kv_flags == ()


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
