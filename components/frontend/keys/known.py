"""The API keys that a frontend knows: those of the registry, and those of the files that settings name."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from dynamo_local.core.errors import ConfigError, StateError
from dynamo_local.core.keys.registry import KeyRegistry
from dynamo_local.core.keys.values import ApiKey
from dynamo_local.log_once import LogOnce
from state.keys import read_key_registry
from state.paths import StatePaths

_log = logging.getLogger(__name__)


# The registry, read from its file whenever that has changed.
#
# The server notes each change in the file of limits, which frontends have mapped and look at for each request: a key
# that was revoked is unknown from the moment on at which the server has said so, also to a frontend that has lost the
# bus. The registry's file itself is looked at every second, for changes that nobody has noted.

LOOK_EVERY_S = 1.0

_Signature = tuple[int, ...]


class KnownKeys:
    """The keys of one namespace. What cannot be read is as it was before; at first, it is a lock that nothing opens.

    `why_closed`: why no key is known although there may be some; empty: they are known. `needs_key`: whether there is a
    key, so that requests need one. `version` grows with each change of the keys.
    """

    def __init__(
        self, paths: StatePaths, changed: Callable[[], bytes] = bytes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`changed` returns what is another value after each change that the server has noted."""
        self.why_closed = ""
        self.needs_key = False
        self.has_admins = False
        self.version = 0
        self._paths = paths
        self._file, self._copy = os.fspath(paths.keys_file), os.fspath(paths.keys_copy)
        self._seen: _Signature | None = None
        self._by_digest: dict[str, ApiKey] = {}
        self._by_owner: dict[str, ApiKey] = {}
        self._log_once = LogOnce(_log)
        self._changed, self._clock = changed, clock
        self._change = b""
        self._look_at = -math.inf
        self.look()

    def look(self) -> None:
        """Read the file if it has changed."""
        change, now = self._changed(), self._clock()
        if change == self._change and now < self._look_at:
            return
        self._change, self._look_at = change, now + LOOK_EVERY_S
        signature = _signature(self._file) or _signature(self._copy)
        if signature == self._seen:
            return
        first, self._seen = self._seen is None, signature
        if not signature:
            # There never were keys. Files that are gone are no order to open the server.
            if not first:
                self._log_once.warn("the registry of keys is gone; the last one holds until the server ends")
            return
        try:
            registry = read_key_registry(self._paths)
        except StateError as error:
            self._log_once.warn(f"{error}; the last keys hold")
            self.why_closed = "" if self._by_digest else f"the keys are not known: {error.cause}"
            return
        self._log_once.clear()
        self.why_closed = ""
        self._take(registry)

    def of_owner(self, owner: str) -> ApiKey | None:
        """Find the key whose owner in stores that is; one that has expired included."""
        return self._by_owner.get(owner)

    def find(self, digest: str, now: float) -> ApiKey | None:
        """Find the key that is known by the secret of this digest now; one that has expired included."""
        key = self._by_digest.get(digest)
        if key is None or (digest != key.digest and digest not in key.digests(now)):
            return None
        return key

    def _take(self, registry: KeyRegistry) -> None:
        self.version += 1
        self.needs_key = bool(registry.keys)
        self.has_admins = any(key.admin for key in registry.keys.values())
        self._by_owner = {key.owner: key for key in registry.keys.values()}
        self._by_digest = {
            digest: key
            for key in registry.keys.values()
            for digest in (key.digest, *(() if key.former is None else (key.former.digest,)))
        }


def _signature(path: str) -> _Signature:
    """What changes with each replacement of a file; empty: there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 -- twice as fast as a Path's
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size, found.st_ctime_ns


# Files of keys: what is written there counts within a second, without a restart.

_LARGEST_KEY_FILE = 1024 * 1024
"""In bytes."""


def read_keys(path: Path | None, setting: str) -> tuple[str, ...]:
    """Read the keys of a file; none without one. Raises ConfigError, also for a file without keys."""
    return () if path is None else keys_in(path.expanduser(), setting)


def keys_in(path: Path, setting: str) -> tuple[str, ...]:
    """Read the keys of a file. Raises ConfigError, also for a file without keys."""
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_KEY_FILE + 1)
        keys = tuple(line.strip() for line in data.decode().splitlines() if line.strip())
    except OSError as error:
        raise ConfigError(f"cannot read the keys in {path}: {error.strerror}") from error
    except UnicodeError as error:
        raise ConfigError(f"{path} holds no keys, which are text", "write one key per line") from error
    if len(data) > _LARGEST_KEY_FILE:
        raise ConfigError(f"{path} is larger than {_LARGEST_KEY_FILE} bytes", "write one key per line")
    if not keys:
        # An empty file must not open the server to everybody.
        raise ConfigError(f"{path} holds no key", f"write one key per line, or leave {setting} out")
    return keys


LOOK_AT_FILES_EVERY_S = 0.25
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
        look_every_s: float = LOOK_AT_FILES_EVERY_S,
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
