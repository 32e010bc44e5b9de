"""State folders of nodes, side by side: the id of a node that has ended is not used again."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

from dynamo_local.core.errors import StateError
from state.files import make_private_directory, remove_tree, replace_file
from state.locks import is_locked

_HOST = "host"
"""File in a folder: the machine that uses it. Several may have their folders on one file system, whose locks may tell
nothing of those of others."""

_KEPT_S = 3600.0
"""For those who want to read the logs; and a node server that is just starting holds no lock yet."""


def remove_left(root: Path) -> None:
    """Make `root`, this node's folder, and remove those beside it that this machine has used and in which no node
    server runs. Raises StateError if it cannot be made."""
    host = socket.gethostname()
    make_private_directory(root)
    replace_file(root / _HOST, host.encode(), durable=False)
    now = root.stat().st_mtime
    for folder in root.parent.iterdir():
        with suppress(OSError, StateError):
            is_ours = (folder / _HOST).read_text() == host
            if is_ours and now - folder.stat().st_mtime >= _KEPT_S and not any(map(is_locked, folder.glob("*.lock"))):
                remove_tree(folder)
