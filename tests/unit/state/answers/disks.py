"""Disks that fail."""

from __future__ import annotations

import errno
import os

from state.files import Disk


class FullDisk(Disk):
    """A disk on which nothing is synchronised while it is full."""

    is_full = False

    def sync(self, descriptor: int) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
