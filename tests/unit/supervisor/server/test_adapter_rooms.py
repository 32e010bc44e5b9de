"""A server that starts has room for the adapters that are ordered, as their files ask for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_local.core.endpoints.checks import read_spec
from dynamo_local.core.endpoints.registry import Registry, ordered
from dynamo_local.core.endpoints.spec import AdapterRoom, EndpointSpec
from dynamo_local.core.errors import EndpointConflictError, UsageError
from dynamo_local.supervisor.server.adapter_rooms import with_rooms
from state.devices.allocation import cpu_slots
from tests.unit import adapter_files

SLOTS = cpu_slots(range(2), 2)


def adapter(root: Path, name: str, rank: int, base: str = "chat") -> EndpointSpec:
    folder = adapter_files.adapter(root / name, rank=rank)
    return read_spec({"name": name, "model": str(folder), "adapter_of": base})


def chat(**args: object) -> EndpointSpec:
    return read_spec({"name": "chat", "model": "m", "args": args})


def started(registry: Registry, specs: list[EndpointSpec], now: float) -> Registry:
    """As a server that starts has it."""
    return ordered(registry, with_rooms(specs, ordered(registry, specs, now), SLOTS), now)


def test_the_bases_of_a_file_get_room_once(tmp_path: Path) -> None:
    specs = [chat(), adapter(tmp_path, "one", 8), adapter(tmp_path, "two", 40)]
    first = started(Registry(), specs, 1.0)
    assert first.entries["chat"].spec.adapter_room == AdapterRoom(4, 64)
    assert first.entries["chat"].revision == 1
    # The next server with this file changes nothing.
    assert started(first, specs, 2.0) == first
    # Another adapter has its base changed, whether that is in the file or not.
    more = [adapter(tmp_path, "large", 100)]
    again = started(first, more, 3.0)
    assert again.entries["chat"].spec.adapter_room == AdapterRoom(4, 128)


def test_adapters_that_were_ordered_earlier_may_have_gone(tmp_path: Path) -> None:
    gone = read_spec({"name": "gone", "model": "/gone", "adapter_of": "chat"})
    registry = ordered(Registry(), [chat(), gone], 1.0)
    assert with_rooms([chat()], registry, SLOTS)[0].adapter_room == AdapterRoom(4, 16)
    with pytest.raises(UsageError, match="adapter gone: /gone does not exist"):
        with_rooms([gone], registry, SLOTS)


def test_what_the_file_says_is_not_changed(tmp_path: Path) -> None:
    specs = [chat(enable_lora=True, max_loras=1), adapter(tmp_path, "one", 8), adapter(tmp_path, "two", 8)]
    with pytest.raises(EndpointConflictError, match=r"set max-loras of chat to 2 or more$"):
        with_rooms(specs, ordered(Registry(), specs, 1.0), SLOTS)
