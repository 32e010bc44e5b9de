"""Orders about keys at the server: each is written down before it is answered, with who gave it; secrets are not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import msgspec
import pytest

from dynamo_local.core.keys.registry import KeyRegistry
from dynamo_local.core.keys.values import digest_of
from dynamo_local.core.messages.events import Event
from dynamo_local.core.messages.keys import CreateKey, KeysAnswer, ListKeys, RevokeKey, RotateKey
from dynamo_local.supervisor.endpoints.kept_registry import KeptDocument
from dynamo_local.supervisor.keys.orders import KeyOrders, new_secret
from dynamo_local.supervisor.keys.start import order_without_server
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
        self.orders = KeyOrders(kept, self.events.append, lambda: NOW, lambda: f"secret {next(numbers)}")


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    with ServerLock(StatePaths(tmp_path, "dynamo")) as lock:
        yield Office(lock)


async def test_a_key_is_on_disk_when_it_is_answered_and_its_secret_is_nowhere(office: Office) -> None:
    answer = await office.orders.answer(CreateKey({"name": "a", "expires_in_s": 60, "admin": True}, "boss"))
    assert (answer.secret, answer.refused) == ("secret 0", None)
    (view,) = answer.keys
    assert (view.name, view.expires_at, view.admin) == ("a", NOW + 60, True)
    assert read_key_registry(office.paths).key("a").digest == digest_of(b"secret 0")
    (event,) = office.events
    assert (event.what, event.why, event.key) == ("key a created, of an administrator", "by key boss", "boss")
    for path in office.paths.root.iterdir():
        assert b"secret 0" not in path.read_bytes()
    assert b"secret" not in msgspec.json.encode(event)
    listed = await office.orders.answer(ListKeys())
    assert listed == KeysAnswer((view,))


async def test_a_rotation_keeps_the_former_secret_for_the_overlap(office: Office) -> None:
    await office.orders.answer(CreateKey({"name": "a"}))
    answer = await office.orders.answer(RotateKey("a", 5))
    assert (answer.secret, answer.keys[0].former_until) == ("secret 1", NOW + 5)
    key = read_key_registry(office.paths).key("a")
    assert key.digests(NOW) == (digest_of(b"secret 1"), digest_of(b"secret 0"))
    assert (await office.orders.answer(RotateKey("a"))).keys[0].former_until == NOW + 3600


@pytest.mark.parametrize(
    ("order", "status"),
    [
        (CreateKey({"name": "A b"}), 400),
        (CreateKey({"name": "a"}), 409),
        (CreateKey({"name": "b", "limit": 5}), 400),
        (RotateKey("b"), 404),
        (RotateKey("a", "long"), 400),
        (RevokeKey("b"), 404),
        (RevokeKey("a"), 409),
        (ListKeys("b"), 404),
    ],
)
async def test_an_order_that_is_refused_changes_nothing(
    office: Office, order: CreateKey | RotateKey | RevokeKey | ListKeys, status: int
) -> None:
    await office.orders.answer(CreateKey({"name": "a"}))
    before = read_key_registry(office.paths)
    answer = await office.orders.answer(order)
    assert answer.refused is not None
    assert (answer.refused.status, answer.secret, answer.keys) == (status, None, ())
    assert read_key_registry(office.paths) == before
    assert len(office.events) == 1


async def test_orders_at_once_lose_nothing(office: Office) -> None:
    orders = [office.orders.answer(CreateKey({"name": f"k{number}"})) for number in range(20)]
    await asyncio.gather(*orders)
    assert sorted(read_key_registry(office.paths).keys) == sorted(f"k{number}" for number in range(20))


async def test_without_a_server_the_files_are_changed(tmp_path: Path) -> None:
    paths = StatePaths(tmp_path / "state", "dynamo")
    answer = await order_without_server(paths, CreateKey({"name": "a"}), Silent())
    assert answer.secret is not None
    assert read_key_registry(paths).key("a").digest == digest_of(answer.secret.encode())
    await order_without_server(paths, RevokeKey("a", opens=True), Silent())
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
