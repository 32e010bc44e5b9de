"""The keys of the registry as frontends know them: read from its file whenever that has changed.

The server notes each change in the file of limits, which frontends have mapped and look at for each request: a key that
was revoked is unknown from the moment on at which the server has said so, also to a frontend that has lost the bus. The
registry's file itself is looked at every second, for changes that nobody has noted.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable

from dynamo_local.core.errors import StateError
from dynamo_local.core.keys.registry import KeyRegistry
from dynamo_local.core.keys.values import ApiKey
from dynamo_local.log_once import LogOnce
from state.keys import read_key_registry
from state.paths import StatePaths

_log = logging.getLogger(__name__)

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
