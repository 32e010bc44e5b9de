"""Settings that change while the server runs: a key-value bucket of JetStream, and what processes read from it.

The bucket holds only what somebody has set; where it is silent, the graph's configuration holds. It is created by its
owner, `dynamo serve`, and lasts as long as the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from dynamo_local.bus.jetstream import JetStream, StreamAbsentError
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.subscriptions import Message
from dynamo_local.core.errors import BusError, UsageError
from dynamo_local.core.live_settings import SETTINGS, setting
from dynamo_local.core.names import Subjects
from dynamo_local.log_once import LogOnce

_log = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
READ_EVERY_S = 15.0
"""Changes are told at once; one that was told while the connection was down is read after so long at most."""


class LiveSettings:
    """The settings as one process sees them. `defaults` hold for what is not set.

    Without a bucket, or while NATS is down, the values are those last read.
    """

    def __init__(
        self, bus: Bus, subjects: Subjects, defaults: Mapping[str, int], *, read_every_s: float = READ_EVERY_S
    ) -> None:
        self._bus = bus
        self._bucket = subjects.settings_bucket
        self._changes = subjects.setting_changes
        self._stream = JetStream(bus, timeout_s=_TIMEOUT_S)
        self._defaults = {name: defaults.get(name, known.default) for name, known in SETTINGS.items()}
        self._set: dict[str, int] = {}
        self._read_every_s = read_every_s
        self._changed = asyncio.Event()
        self._log_once = LogOnce(_log)

    def get(self, name: str) -> int:
        """The value that holds now. Raises UsageError for an unknown setting."""
        return self._set.get(name, self._defaults[setting(name).name])

    async def start(self) -> None:
        """Have changes told, and read what is set already. Trouble is a warning, not an error."""

        async def on_change(_: Message) -> None:
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
            self._log_once.warn("there are no live settings, the graph's configuration holds")
            self._adopt({})
        except BusError as error:
            self._log_once.warn(f"live settings cannot be read, the last known hold: {error}")
        else:
            self._log_once.clear()
            self._adopt(understood(stored))

    def _adopt(self, values: dict[str, int]) -> None:
        for name in SETTINGS:
            before, now = self.get(name), values.get(name, self._defaults[name])
            if before != now:
                _log.warning("%s is %d now, was %d", name, now, before)
        self._set = values


async def read_settings(bus: Bus, subjects: Subjects) -> dict[str, int]:
    """What is set, by name; nothing for settings that are not. Raises BusError."""
    return understood(await JetStream(bus, timeout_s=_TIMEOUT_S).read(subjects.settings_bucket, tuple(SETTINGS)))


async def write_setting(bus: Bus, subjects: Subjects, name: str, value: int) -> None:
    """Set a setting. Raises UsageError for what is not allowed, before anything is written; BusError."""
    checked = setting(name).parse(str(value))
    await JetStream(bus, timeout_s=_TIMEOUT_S).write(subjects.settings_bucket, name, str(checked).encode())


def understood(stored: Mapping[str, bytes]) -> dict[str, int]:
    """The values among what is stored; with a warning for what is none."""
    values: dict[str, int] = {}
    for name, data in stored.items():
        try:
            values[name] = setting(name).parse(data.decode(errors="replace"))
        except UsageError as error:
            _log.warning("live setting ignored: %s", error)
    return values


async def create_settings(bus: Bus, subjects: Subjects) -> None:
    """For the owner alone: a new, empty bucket, instead of one that an earlier owner has left. Raises BusError."""
    await JetStream(bus, timeout_s=_TIMEOUT_S).create_bucket(subjects.settings_bucket, subjects.setting_changes)


async def delete_settings(bus: Bus, subjects: Subjects) -> bool:
    """For the owner alone. False if there was none. Raises BusError."""
    return await JetStream(bus, timeout_s=_TIMEOUT_S).delete_bucket(subjects.settings_bucket)
