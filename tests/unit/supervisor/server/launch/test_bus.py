"""Which NATS a server uses, and where its own one listens."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.certificate import make_certificate
from dynamo_local.core.errors import UsageError
from dynamo_local.supervisor.server.launch.bus import bus_of, external_bus


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
