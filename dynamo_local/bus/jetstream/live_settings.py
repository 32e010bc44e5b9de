"""Live settings on the bus: a key-value bucket of JetStream, written by `dynamo config` and followed by frontends.

The bucket contains only settings that have been set while the server runs; for all others the graph's configuration
holds. It is created by its owner, `dynamo serve`, and deleted with the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from dynamo_local.bus.jetstream.streams import JetStream, StreamAbsentError
from dynamo_local.bus.nats import Bus, RawMessage
from dynamo_local.core.errors import BusDownError, BusError, UsageError
from dynamo_local.core.live_settings import SETTINGS, LiveSettings, setting
from dynamo_local.core.subjects import Subjects
from dynamo_local.log_once import LogOnce

_log = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
READ_EVERY_S = 15.0
"""Interval of reading all settings. Changes are published at once, but lost to a process whose connection is down."""


class LiveSettingsWatch:
    """Follows the settings for one process. `configured` are the values of the settings that are not set.

    Without a bucket, these hold for all settings. While NATS is down, the values last read hold.
    """

    def __init__(
        self, bus: Bus, subjects: Subjects, configured: LiveSettings, *, read_every_s: float = READ_EVERY_S
    ) -> None:
        self.current = configured
        """The values that hold now."""
        self._bus = bus
        self._bucket = subjects.settings_bucket
        self._changes = subjects.setting_changes
        self._stream = JetStream(bus, timeout_s=_TIMEOUT_S)
        self._configured = configured
        self._read_every_s = read_every_s
        self._changed = asyncio.Event()
        self._log_once = LogOnce(_log)

    async def start(self) -> None:
        """Listen to changes, and read the settings. A failure is logged, not raised."""

        async def on_change(_: RawMessage) -> None:
            self._changed.set()

        await self._bus.subscribe(self._changes, on_change)
        await self._read()

    async def run(self) -> None:
        """Follow changes until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._read_every_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            await self._read()

    async def _read(self) -> None:
        try:
            stored = await self._stream.read(self._bucket, tuple(SETTINGS))
        except StreamAbsentError:
            self._log_once.warn("there are no live settings: the graph's configuration holds")
            self._adopt({})
        except BusDownError:
            return
        except BusError as error:
            self._log_once.warn(f"live settings cannot be read, those last read hold: {error}")
        else:
            self._log_once.clear()
            self._adopt(decoded(stored))

    def _adopt(self, values: dict[str, int]) -> None:
        before, self.current = self.current, self._configured.changed(values)
        for known in SETTINGS.values():
            was, now = getattr(before, known.field), getattr(self.current, known.field)
            if was != now:
                _log.warning("%s is %d now, was %d", known.name, now, was)


async def read_settings(bus: Bus, subjects: Subjects) -> dict[str, int]:
    """Read the settings that have been set, by name. Raises BusError."""
    return decoded(await JetStream(bus, timeout_s=_TIMEOUT_S).read(subjects.settings_bucket, tuple(SETTINGS)))


async def write_setting(bus: Bus, subjects: Subjects, name: str, value: int) -> None:
    """Set a setting. Raises UsageError for an unknown name or a value that is not allowed, and BusError."""
    checked = setting(name).parse(str(value))
    await JetStream(bus, timeout_s=_TIMEOUT_S).write(subjects.settings_bucket, name, str(checked).encode())


def decoded(stored: Mapping[str, bytes]) -> dict[str, int]:
    """Values of stored settings, by name. Those that are not allowed are left out, with a warning."""
    values: dict[str, int] = {}
    for name, data in stored.items():
        try:
            values[name] = setting(name).parse(data.decode(errors="replace"))
        except UsageError as error:
            _log.warning("a live setting is ignored: %s", error)
    return values


async def create_settings(bus: Bus, subjects: Subjects) -> None:
    """Create an empty bucket, for the owner alone. Replaces one left by an earlier owner. Raises BusError."""
    await JetStream(bus, timeout_s=_TIMEOUT_S).create_bucket(subjects.settings_bucket, subjects.setting_changes)


async def delete_settings(bus: Bus, subjects: Subjects) -> bool:
    """Delete the bucket, for the owner alone. Returns False if there was none. Raises BusError."""
    return await JetStream(bus, timeout_s=_TIMEOUT_S).delete_bucket(subjects.settings_bucket)
