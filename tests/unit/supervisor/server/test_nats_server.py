"""The configuration of the server's own NATS, and the tokens in it."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import msgspec

from dynamo_local.bus.address import BusAddress
from dynamo_local.supervisor.server.nats_server import NatsServer, write_bus_address


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
