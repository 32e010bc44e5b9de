"""The address of the bus as a process knows it, and the file that holds a new one once the token was replaced."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from dynamo_local.bus.address import BusAddress
from dynamo_local.core.errors import BusError

_READ_WITHIN_S = 1.0


class KnownAddress:
    """An address that is read anew from `path`, if there is one, when it is asked for."""

    def __init__(self, address: BusAddress, path: Path | None = None) -> None:
        self.current = address
        self._path = path
        self._reading: asyncio.Task[BusAddress] | None = None

    async def read_again(self) -> bool:
        """Read the file, and return whether the address has changed. One that cannot be read within a second has not:
        it is read on, and found the next time."""
        if self._path is None:
            return False
        if self._reading is None:
            self._reading = asyncio.create_task(asyncio.to_thread(BusAddress.load, self._path), name="address of NATS")
        reading = self._reading
        await asyncio.wait({reading}, timeout=_READ_WITHIN_S)
        if not reading.done():
            return False
        self._reading = None
        before = self.current
        with suppress(BusError):
            self.current = reading.result()
        return self.current != before
