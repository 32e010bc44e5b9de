"""Has /proc show a forked process's own command line and environment, not those of its parent.

The kernel reads both from the memory into which it wrote them when the program started. `ps` shows them, and the
processes of a crashed server are recognised by them (state/statefile/leftovers.py). The process's environment must
have been replaced before, because the old one lies in the memory that is overwritten here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dynamo_local.process.forkserver.preload import OWN_PREFIX

_AREAS = slice(
    45, 49
)  # arg_start, arg_end, env_start, env_end after the command's closing parenthesis in /proc/PID/stat


def set_process_title(argv: Sequence[bytes], environ: Mapping[bytes, bytes]) -> None:
    """Write both, as far as there is room. Our own variables come first, so that those which identify a process fit."""
    text = Path("/proc/self/stat").read_text(errors="replace")
    arg_start, arg_end, env_start, env_end = map(int, text.rpartition(")")[2].split()[_AREAS])
    ranked = sorted(environ.items(), key=lambda item: not item[0].startswith(OWN_PREFIX))
    _fill(arg_start, arg_end, argv)
    _fill(env_start, env_end, (b"=".join(item) for item in ranked))


def _fill(start: int, end: int, entries: Iterable[bytes]) -> None:
    """Write the entries that fit, each whole and followed by NUL, and fill the rest with NUL."""
    room = end - start
    written = b""
    for entry in entries:
        if len(written) + len(entry) + 1 <= room:
            written += entry + b"\0"
    ctypes.memmove(start, written.ljust(room, b"\0"), room)
