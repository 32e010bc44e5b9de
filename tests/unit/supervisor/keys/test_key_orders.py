"""Orders about keys at the server: each is written down before it is answered, with who gave it; secrets are not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_local.control.errors import status_of
from dynamo_local.control.operations import CREATE_KEY, GET_KEY, LIST_KEYS, REVOKE_KEY, ROTATE_KEY, Call, Operation
from dynamo_local.core.errors import UsageError
from dynamo_local.core.keys.registry import KeyRegistry
from dynamo_local.core.keys.values import digest_of
from dynamo_local.core.messages.reports import Event
from dynamo_local.supervisor.endpoints.kept_registry import KeptDocument
from dynamo_local.supervisor.keys.orders import KeyOrders, new_secret
from dynamo_local.supervisor.keys.start import do_without_server
from state.documents import DocumentStore
from state.keys import KEYS, read_key_registry
from state.locks import ServerLock
from state.paths import StatePaths

NOW = 1000.0


class Office:
    """Orders of one server, with the events that it records."""

    def __init__(self, lock: ServerLock) -> None:
        self.events: list[Event] = []
        self.paths = lock.paths
        numbers = count()
        kept = KeptDocument(DocumentStore(KEYS, lock), KeyRegistry())
        self.orders = KeyOrders(
            kept, self.events.append, wall_clock=lambda: NOW, make_secret=lambda: f"secret {next(numbers)}"
        )


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    with ServerLock(StatePaths(tmp_path, "dynamo")) as lock:
        yield Office(lock)


async def do(orders: KeyOrders, operation: Operation, fields: Any = None, name: str = "", by: str = "") -> Any:
    """What an order is answered with."""
    body = b"" if fields is None else msgspec.json.encode(fields)
    return await orders.handlers[operation](Call({"name": name}, body=body, by=by))


async def test_a_key_is_on_disk_when_it_is_answered_and_its_secret_is_nowhere(office: Office) -> None:
    fields = {"name": "a", "expires_in_s": 60, "admin": True}
    created = await do(office.orders, CREATE_KEY, fields, by="boss")
    assert created.pop("secret") == "secret 0"
    assert (created["name"], created["expires_at"], created["admin"]) == ("a", NOW + 60, True)
    assert read_key_registry(office.paths).key("a").digest == digest_of(b"secret 0")
    (event,) = office.events
    assert (event.what, event.why, event.key) == ("key a created, of an administrator", "by key boss", "boss")
    for path in office.paths.root.iterdir():
        assert b"secret 0" not in path.read_bytes()
    assert b"secret" not in msgspec.json.encode(event)
    assert await do(office.orders, LIST_KEYS) == {"object": "list", "data": [created]}
    assert await do(office.orders, GET_KEY, name="a") == created


async def test_a_rotation_keeps_the_former_secret_for_the_overlap(office: Office) -> None:
    await do(office.orders, CREATE_KEY, {"name": "a"})
    rotated = await do(office.orders, ROTATE_KEY, {"overlap_s": 5}, "a")
    assert (rotated["secret"], rotated["former_until"]) == ("secret 1", NOW + 5)
    key = read_key_registry(office.paths).key("a")
    assert key.digests(NOW) == (digest_of(b"secret 1"), digest_of(b"secret 0"))
    assert (await do(office.orders, ROTATE_KEY, name="a"))["former_until"] == NOW + 3600


async def test_frontends_are_told_before_an_order_is_answered(office: Office) -> None:
    told: list[int] = []
    orders = replace(office.orders, changed=lambda: told.append(len(read_key_registry(office.paths).keys)))
    await do(orders, CREATE_KEY, {"name": "a"})
    await do(orders, REVOKE_KEY, {"open": True}, "a")
    await do(orders, LIST_KEYS)
    assert told == [1, 0]


@pytest.mark.parametrize(
    ("operation", "name", "fields", "status"),
    [
        (CREATE_KEY, "", {"name": "A b"}, 400),
        (CREATE_KEY, "", {"name": "a"}, 409),
        (CREATE_KEY, "", {"name": "b", "limit": 5}, 400),
        (CREATE_KEY, "", [], 400),
        (CREATE_KEY, "", None, 400),
        (GET_KEY, "A b", None, 400),
        (GET_KEY, "b", None, 404),
        (ROTATE_KEY, "b", None, 404),
        (ROTATE_KEY, "a", {"overlap_s": "long"}, 400),
        (ROTATE_KEY, "a", {"overlap": 1}, 400),
        (REVOKE_KEY, "b", None, 404),
        (REVOKE_KEY, "a", None, 409),
        (REVOKE_KEY, "a", {"open": 1}, 400),
        (REVOKE_KEY, "a", {"opens": True}, 400),
    ],
)
async def test_an_order_that_is_refused_changes_nothing(
    office: Office, operation: Operation, name: str, fields: Any, status: int
) -> None:
    await do(office.orders, CREATE_KEY, {"name": "a"})
    before = read_key_registry(office.paths)
    with pytest.raises(UsageError) as refused:
        await do(office.orders, operation, fields, name)
    assert status_of(refused.value) == status
    assert read_key_registry(office.paths) == before
    assert len(office.events) == 1


async def test_orders_at_once_lose_nothing(office: Office) -> None:
    orders = [do(office.orders, CREATE_KEY, {"name": f"k{number}"}) for number in range(20)]
    await asyncio.gather(*orders)
    assert sorted(read_key_registry(office.paths).keys) == sorted(f"k{number}" for number in range(20))


async def test_without_a_server_the_files_are_changed(tmp_path: Path) -> None:
    paths = StatePaths(tmp_path / "state", "dynamo")
    answer = await do_without_server(paths, CREATE_KEY, Call(body=b'{"name": "a"}'), Silent())
    assert read_key_registry(paths).key("a").digest == digest_of(answer["secret"].encode())
    await do_without_server(paths, REVOKE_KEY, Call({"name": "a"}, body=b'{"open": true}'), Silent())
    assert "server answers everybody" in paths.events_file.read_text()
    assert not paths.server_lock.exists()


def test_secrets_have_256_bits_and_are_never_the_same() -> None:
    secrets = {new_secret() for _ in range(1000)}
    assert len(secrets) == 1000
    assert all(len(secret) == 4 + 43 and secret.startswith("dyn-") for secret in secrets)


class Silent:
    """A report that nobody reads."""

    def step(self, text: str) -> None:
        pass

    def pending(self, text: str) -> None:
        pass

    def say(self, text: str) -> None:
        pass
