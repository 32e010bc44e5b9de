"""`python -m dynamo_local.supervisor.circus.adopted PID START_TIME -- COMMAND ARG...`: stands for a running process.

A new circusd (daemon_restarts.py) cannot be the parent of what the one before has started. As long as the process PID
that started at START_TIME lives, this one stands for it: signals are passed on, and it ends as that one ends. If that
one is dead, COMMAND is run; so it is when circus starts the watcher again.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from dynamo_local.process.ancestry import PARENT_PID_ENV, die_with_parent
from dynamo_local.process.following import end_like, follow
from dynamo_local.process.groups import kill_group
from state.processes import alive, exit_code

_MODULE = "dynamo_local.supervisor.circus.adopted"
_STANDING = "adopted"
"""What /proc calls a process that stands for another one by now."""

_UNKNOWN_END = -9
"""How a process is said to have ended when nobody knows: as one that was killed."""


def adoption(pid: int, started: int, argv: tuple[str, ...]) -> tuple[str, ...]:
    """The command of a watcher whose process runs already, and which is started by `argv` once it does not."""
    return (sys.executable, "-m", _MODULE, str(pid), str(started), "--", *argv)


def parse_adoption(argv: list[str]) -> tuple[int, int, list[str]] | None:
    """Inverse of `adoption`, whatever precedes it; None for other commands."""
    if _MODULE not in argv:
        return None
    arguments = argv[argv.index(_MODULE) + 1 :]
    if len(arguments) < 4 or arguments[2] != "--":
        return None
    return int(arguments[0]), int(arguments[1]), arguments[3:]


def living_process(pid: int) -> int:
    """The process that this one stands for; itself if it stands for none, or for one that has ended."""
    with suppress(OSError):
        found = parse_adoption(command_line(pid))
        if found is not None and alive(found[0], found[1]):
            return found[0]
    return pid


def stands_in(pid: int) -> bool:
    """Whether that process stands for another one by now."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == _STANDING
    except OSError:
        return False


def command_line(pid: int) -> list[str]:
    """What /proc says. Raises OSError when it is gone."""
    return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).removesuffix("\0").split("\0")


def main() -> None:
    """Stand for that process, or become the command."""
    found = parse_adoption(sys.orig_argv)
    if found is None:
        sys.exit(f"usage: python -m {_MODULE} PID START_TIME -- COMMAND ARG...")
    pid, started, command = found
    # Not for the command, which is tied to the server.
    circusd = int(os.environ.pop(PARENT_PID_ENV))
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        # Asked after opening: from here on it cannot come to mean another process.
        if alive(pid, started):
            # The next circusd has another one in this one's place.
            die_with_parent(circusd)
            follow(handle, lambda: Path("/proc/self/comm").write_text(_STANDING))
            code = exit_code(pid, started)
            # What it has forked would hold on to its devices.
            kill_group(pid)
            end_like(_UNKNOWN_END if code is None else code)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
