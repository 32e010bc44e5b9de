"""Live settings on a real NATS server: set by one process, known to the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from dynamo_local.bus.jetstream.live_settings import (
    LiveSettingsWatch,
    create_settings,
    delete_settings,
    read_settings,
    write_setting,
)
from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import BusError, UsageError
from dynamo_local.core.live_settings import LiveSettings
from dynamo_local.core.subjects import Subjects
from dynamo_local.tasks import TaskGuard
from tests.integration.fleet_of_fakes import until
from tests.integration.nats_process import NatsProcess

pytestmark = pytest.mark.integration

LENGTH, SIZE = "max-local-prefill-length", "max-prefill-queue-size"
DEFAULT_LENGTH = LiveSettings().max_local_prefill_length
NEVER_S = 3600.0

Follow = Callable[..., Awaitable[LiveSettingsWatch]]


def holds(settings: LiveSettingsWatch, size: int) -> bool:
    return settings.current.max_prefill_queue_size == size


@pytest.fixture
async def follow(subjects: Subjects) -> AsyncIterator[Follow]:
    """Starts a process's view of the settings, which follows them until the test ends."""
    tasks = TaskGuard()

    async def start(bus: Bus, read_every_s: float = NEVER_S, **configured: Any) -> LiveSettingsWatch:
        settings = LiveSettingsWatch(bus, subjects, LiveSettings(**configured), read_every_s=read_every_s)
        await settings.start()
        tasks.spawn("live settings", settings.run())
        return settings

    yield start
    await tasks.close()


async def test_what_is_not_set_is_as_configured_else_the_default(bus: Bus, subjects: Subjects, follow: Follow) -> None:
    await create_settings(bus, subjects)
    settings = await follow(bus, max_prefill_queue_size=7)
    assert settings.current.max_prefill_queue_size == 7
    assert settings.current.max_local_prefill_length == DEFAULT_LENGTH


async def test_a_change_is_told_at_once(bus: Bus, subjects: Subjects, follow: Follow) -> None:
    await create_settings(bus, subjects)
    settings = await follow(bus, max_prefill_queue_size=7)
    for value in (0, 5, 6):
        await write_setting(bus, subjects, SIZE, value)
        await until(partial(holds, settings, value))
    assert settings.current.max_local_prefill_length == DEFAULT_LENGTH
    assert await read_settings(bus, subjects) == {SIZE: 6}


async def test_who_starts_later_knows_what_was_set(bus: Bus, subjects: Subjects, follow: Follow) -> None:
    await create_settings(bus, subjects)
    await write_setting(bus, subjects, LENGTH, 12)
    assert (await follow(bus)).current.max_local_prefill_length == 12


async def test_what_is_not_allowed_is_not_written(bus: Bus, subjects: Subjects) -> None:
    await create_settings(bus, subjects)
    for name, value in ((LENGTH, -1), ("seed", 1)):
        with pytest.raises(UsageError):
            await write_setting(bus, subjects, name, value)
    assert await read_settings(bus, subjects) == {}


async def test_nonsense_in_the_bucket_is_ignored(
    bus: Bus, subjects: Subjects, follow: Follow, caplog: pytest.LogCaptureFixture
) -> None:
    await create_settings(bus, subjects)
    await write_setting(bus, subjects, LENGTH, 5)
    settings = await follow(bus)
    await bus.request(f"$KV.{subjects.settings_bucket}.{LENGTH}", b"\xff", timeout_s=5)
    await until(lambda: "live setting is ignored" in caplog.text)
    assert settings.current.max_local_prefill_length == DEFAULT_LENGTH


async def test_without_a_bucket_the_defaults_hold_with_one_warning(
    bus: Bus, subjects: Subjects, follow: Follow, caplog: pytest.LogCaptureFixture
) -> None:
    settings = await follow(bus, read_every_s=0.01, max_prefill_queue_size=7)
    assert settings.current.max_prefill_queue_size == 7
    with pytest.raises(BusError):
        await write_setting(bus, subjects, SIZE, 1)
    # One that comes later is found, and one that goes is missed.
    await create_settings(bus, subjects)
    await write_setting(bus, subjects, SIZE, 3)
    await until(lambda: settings.current.max_prefill_queue_size == 3)
    assert caplog.text.count("there are no live settings") == 1
    assert await delete_settings(bus, subjects)
    await until(lambda: settings.current.max_prefill_queue_size == 7)
    assert not await delete_settings(bus, subjects)


async def test_a_new_owner_starts_with_nothing_set(bus: Bus, subjects: Subjects) -> None:
    await create_settings(bus, subjects)
    await write_setting(bus, subjects, SIZE, 3)
    await create_settings(bus, subjects)
    assert await read_settings(bus, subjects) == {}


async def test_settings_outlive_the_server_and_are_followed_again(
    own_nats: NatsProcess, subjects: Subjects, follow: Follow
) -> None:
    bus = await Bus.connect(own_nats.address, name="test")
    await create_settings(bus, subjects)
    settings = await follow(bus, read_every_s=0.05)
    await write_setting(bus, subjects, SIZE, 3)
    await until(lambda: settings.current.max_prefill_queue_size == 3)
    own_nats.kill()
    await until(lambda: not bus.connected)
    with pytest.raises(BusError, match="is down"):
        await write_setting(bus, subjects, SIZE, 4)
    # Long enough for some readings that fail.
    await asyncio.sleep(0.2)
    assert settings.current.max_prefill_queue_size == 3
    own_nats.start()
    await until(lambda: bus.connected)
    assert settings.current.max_prefill_queue_size == 3
    assert await read_settings(bus, subjects) == {SIZE: 3}
    await write_setting(bus, subjects, SIZE, 4)
    await until(lambda: settings.current.max_prefill_queue_size == 4)
    await bus.close()
