"""The configuration of the server's own NATS, and the tokens in it."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from dynamo_local.bus.address import BusAddress
from dynamo_local.supervisor.server.nats.nats_server import NatsServer, write_bus_address


def users(server: NatsServer) -> dict[str, str]:
    return {each["user"]: each["password"] for each in json.loads(server.config_text())["authorization"]["users"]}


def test_a_new_token_is_valid_beside_the_former_until_that_ends(tmp_path: Path) -> None:
    old = NatsServer.at(tmp_path / "nats")
    both = old.with_new_token()
    alone = both.without_former()
    assert users(old) == {old.login.user: old.login.token}
    assert users(both) == users(old) | users(alone)
    assert len(users(both)) == 2
    assert (both.address.user, both.address.token) == (alone.login.user, alone.login.token)
    assert old.login.token not in alone.config_text()


def test_of_two_rotations_only_the_last_two_tokens_are_valid(tmp_path: Path) -> None:
    """A rotation that did not come to its end is followed by another."""
    first = NatsServer.at(tmp_path)
    second = first.with_new_token()
    third = second.with_new_token()
    assert users(third) == {login.user: login.token for login in (second.login, third.login)}


def test_the_files_are_private_and_replaced_whole(tmp_path: Path) -> None:
    server, file = NatsServer.at(tmp_path / "nats"), tmp_path / "bus.json"
    for each in (server, server.with_new_token()):
        each.write_files()
        write_bus_address(file, each.address)
        assert json.loads(each.config_path.read_text()) == json.loads(each.config_text())
        assert BusAddress.load(file) == each.address
        for path in (each.config_path, file):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {path.name for path in tmp_path.iterdir()} == {"nats", "bus.json"}


def test_no_token_is_shown(tmp_path: Path) -> None:
    server = NatsServer.at(tmp_path).with_new_token()
    assert server.former is not None
    for token in (server.login.token, server.former.token):
        assert token not in f"{server!r} {server.address!r} {server.argv} {server.address.shown}"


def test_an_address_of_an_earlier_release_has_no_user() -> None:
    address = msgspec.json.decode(b'{"url": "nats://127.0.0.1:4222", "token": "t"}', type=BusAddress)
    assert address == BusAddress("nats://127.0.0.1:4222", "t")
    assert address.user is None


def test_on_loopback_it_speaks_no_tls_and_elsewhere_nothing_else(tmp_path: Path) -> None:
    plain, other = NatsServer.at(tmp_path / "plain"), NatsServer.at(tmp_path / "other", "127.0.0.2")
    plain.write_files()
    other.write_files()
    assert not {"tls", "ping_interval"} & json.loads(plain.config_text()).keys()
    assert not plain.address.wants_tls
    config = json.loads(other.config_text())
    assert config["host"] == "127.0.0.2"
    assert "allow_non_tls" not in config
    assert config["ping_interval"] == "10s"
    assert other.address.url.startswith("tls://127.0.0.2:")
    assert other.address.wants_tls
    for path in other.directory.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert other.with_new_token().address.ca == other.address.ca


def test_nobody_can_sign_another_certificate(tmp_path: Path) -> None:
    """The authority's key is nowhere: there is one key, and it is not that of the authority's certificate."""
    server = NatsServer.at(tmp_path, "127.0.0.2")
    server.write_files()
    (key,) = (path for path in tmp_path.iterdir() if b"PRIVATE KEY" in path.read_bytes())
    assert server.address.ca is not None
    authority = x509.load_pem_x509_certificate(server.address.ca.encode())
    private = serialization.load_pem_private_key(key.read_bytes(), None)
    assert private.public_key() != authority.public_key()
    assert "PRIVATE" not in repr(server)
