"""Tells by a descriptor that the files of a folder have changed (inotify): nobody needs to look again and again."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

_IN_MOVED_FROM, _IN_MOVED_TO, _IN_CREATE, _IN_DELETE = 0x40, 0x80, 0x100, 0x200
_EVENTS = _IN_MOVED_FROM | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE

_libc = ctypes.CDLL(None, use_errno=True)


class FolderWatch:
    """`descriptor` can be read after files of the folder were made, renamed or removed, or the folder itself."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError: the folder is not there, or this user watches too many."""
        # Both flags have the values of open's.
        self.descriptor = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        try:
            _checked(_libc.inotify_add_watch(self.descriptor, os.fsencode(folder), _EVENTS))
        except OSError:
            self.close()
            raise

    def clear(self) -> None:
        """Have the descriptor be readable again only after the next change."""
        with suppress(BlockingIOError):
            while os.read(self.descriptor, 64 * 1024):
                pass

    def close(self) -> None:
        os.close(self.descriptor)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
