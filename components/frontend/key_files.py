"""Follows the files of keys that settings name: what is written there counts within a second, without a restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from components.frontend.settings import keys_in, read_keys
from dynamo_local.core.errors import ConfigError

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
_READ_WITHIN_S = 5.0
"""A read that takes longer is told, and goes on."""

Found = tuple[str, ...] | str
"""What a look has found: keys, or why there are none."""

Happened = Callable[[str, str], Awaitable[None]]
"""Records what happened, and why."""


class KeyFile:
    """The keys of one file. What is no list of keys changes nothing: a file that is emptied, damaged or gone must
    neither open the server nor lock its clients out.

    A change counts when two looks have found the same: a file that is being written is not whole yet.
    """

    def __init__(self, path: Path | None, setting: str) -> None:
        """Read the file; None: there is none, and no keys. Raises ConfigError, as `read_keys`."""
        self.path = None if path is None else path.expanduser()
        self.setting = setting
        self.keys = read_keys(path, setting)
        # What can be read once alone, such as a pipe of the shell, is not read again.
        self.is_followed = self.path is not None and self.path.is_file()
        self._last: Found = self.keys
        self._taken: Found = self.keys

    def look(self) -> Found:
        """Read the file. May take long, as file systems do."""
        assert self.path is not None, "a file that is followed"
        try:
            return keys_in(self.path, self.setting)
        except ConfigError as error:
            return error.cause

    def take(self, found: Found) -> bool:
        """Take what a look has found. Returns whether that is news, and was found twice."""
        is_settled, self._last = found == self._last, found
        if not is_settled or found == self._taken:
            return False
        self._taken = found
        if not isinstance(found, str):
            self.keys = found
        return True


class KeyFiles:
    """Follows files of keys. `on_change` is called when the keys of one have changed; `happened` records it."""

    def __init__(
        self,
        files: Sequence[KeyFile],
        on_change: Callable[[], None],
        happened: Happened,
        *,
        look_every_s: float = LOOK_EVERY_S,
        read_within_s: float = _READ_WITHIN_S,
    ) -> None:
        self._files = files
        self._on_change = on_change
        self._happened = happened
        self._look_every_s = look_every_s
        self._read_within_s = read_within_s

    async def run(self) -> None:
        """Follow all files until cancelled."""
        async with asyncio.TaskGroup() as group:
            for file in self._files:
                if file.is_followed:
                    group.create_task(self._follow(file), name=f"keys of {file.setting}")

    async def _follow(self, file: KeyFile) -> None:
        reading: asyncio.Future[Found] | None = None
        while True:
            await asyncio.sleep(self._look_every_s)
            # One read at a time, however long it takes.
            reading = reading or asyncio.ensure_future(asyncio.to_thread(file.look))
            await asyncio.wait({reading}, timeout=self._read_within_s)
            found: Found = f"reading {file.path} takes longer than {self._read_within_s:g} s"
            if reading.done():
                found, reading = reading.result(), None
            if file.take(found):
                await self._tell(file, found)

    async def _tell(self, file: KeyFile, found: Found) -> None:
        if isinstance(found, str):
            what, why = f"{file.setting} cannot be used, its former keys stay valid", found
            _log.warning("%s: %s", what, why)
        else:
            self._on_change()
            what, why = f"{file.setting} was read anew", f"number of keys: {len(found)}"
            _log.info("%s: %s", what, why)
        await self._happened(what, why)
