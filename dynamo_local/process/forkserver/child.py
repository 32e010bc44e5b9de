"""The life of a forked process: it takes over what the launcher has sent, and runs the service, or is a fork server."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_local.process import main
from dynamo_local.process.ancestry import die_with_writer
from dynamo_local.process.forkserver import protocol
from dynamo_local.process.forkserver.preload import OWN_PREFIX, Preloaded

if TYPE_CHECKING:
    from dynamo_local.process.forkserver.server import AcceptedOrder


def run_child(accepted: AcceptedOrder, preloaded: Preloaded) -> int:
    """Run the service that was ordered, in this forked process. Returns the exit status."""
    exit_code_pipe = take_over(accepted, preloaded, main.__name__)
    sys.argv = [str(main.__file__), *accepted.order.argv]
    preloaded.settle()
    code = main.run(accepted.order.argv)
    protocol.write_exit_code(exit_code_pipe, code)
    return code


def take_over(accepted: AcceptedOrder, preloaded: Preloaded, module: str) -> int:
    """Have this forked process be what was ordered, a run of that module: with its output, its environment and its
    title, and tied to its launcher. Returns the descriptor for its exit code."""
    *stdio, death_pipe, exit_code_pipe = accepted.descriptors
    for target, descriptor in enumerate(stdio):
        os.dup2(descriptor, target)
    protocol.close(stdio)
    # Lead a group, as circus's own children do, so that children are found by this pid (process/groups.py). The session
    # stays the one of all processes (supervisor/circus/circusd.py).
    os.setpgid(0, 0)
    die_with_writer(death_pipe)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    environ = preloaded.environ_for(accepted.order.environ)
    os.environb.clear()
    os.environb.update(environ)
    arguments = ("-m", module, *accepted.order.argv)
    set_process_title([os.fsencode(part) for part in (sys.executable, *arguments)], environ)
    return exit_code_pipe


# Has /proc show a forked process's own command line and environment, not those of its parent.
#
# The kernel reads both from the memory into which it wrote them when the program started. `ps` shows them, and the
# processes of a crashed server are recognised by them (state/statefile/leftovers.py). The process's environment must
# have been replaced before, because the old one lies in the memory that is overwritten here.

_AREAS = slice(45, 49)
"""arg_start, arg_end, env_start, env_end, after the command's closing parenthesis in /proc/PID/stat."""


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
