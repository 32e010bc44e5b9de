"""`python -m dynamo_local.supervisor.circus.adopted PID START_TIME -- COMMAND ARG...`: stands for a running process.

A new circusd (daemon.py) cannot become the parent of processes that the previous one started. For each of them
it starts this program. While the process PID that started at START_TIME (ticks since boot) lives, this program passes
signals on to it, and ends as it ends. If it is dead, COMMAND is run instead; the same happens when circus starts the
watcher again later.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from dynamo_local.process.ancestry import PARENT_PID_ENV, die_with_parent
from dynamo_local.process.following import end_like, follow
from dynamo_local.process.groups import kill_group
from state.machine.processes import alive, exit_code

_MODULE = "dynamo_local.supervisor.circus.adopted"
_STANDING = "adopted"
"""The name that /proc shows for a process that stands for another one."""

_UNKNOWN_EXIT_CODE = -9
"""Reported where the exit code is not known: killed by SIGKILL, which is the likeliest."""


def adoption(pid: int, started: int, argv: tuple[str, ...]) -> tuple[str, ...]:
    """The command of a watcher whose process runs already. `argv` is the command that starts its next process."""
    return (sys.executable, "-m", _MODULE, str(pid), str(started), "--", *argv)


def parse_adoption(argv: list[str]) -> tuple[int, int, list[str]] | None:
    """Inverse of `adoption`, wherever it stands in the command line; None for other commands."""
    if _MODULE not in argv:
        return None
    arguments = argv[argv.index(_MODULE) + 1 :]
    if len(arguments) < 4 or arguments[2] != "--":
        return None
    return int(arguments[0]), int(arguments[1]), arguments[3:]


def living_process(pid: int) -> int:
    """The pid of the process that `pid` stands for; `pid` itself if it stands for none, or for one that has ended."""
    with suppress(OSError):
        found = parse_adoption(command_line(pid))
        if found is not None and alive(found[0], found[1]):
            return found[0]
    return pid


def stands_in(pid: int) -> bool:
    """Whether that process has begun to stand for another one."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == _STANDING
    except OSError:
        return False


def command_line(pid: int) -> list[str]:
    """The command line of a process, by /proc. Raises OSError when the process is gone."""
    return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).removesuffix("\0").split("\0")


def main() -> None:
    """Stand for the process while it lives, or else become the command."""
    found = parse_adoption(sys.orig_argv)
    if found is None:
        sys.exit(f"usage: python -m {_MODULE} PID START_TIME -- COMMAND ARG...")
    pid, started, command = found
    # Removed from the environment: the command is to end with the server, not with circusd.
    circusd = int(os.environ.pop(PARENT_PID_ENV))
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        # Checked after opening the pidfd, which cannot come to mean another process.
        if alive(pid, started):
            # The next circusd will start another one of these.
            die_with_parent(circusd)
            follow(handle, lambda: Path("/proc/self/comm").write_text(_STANDING))
            code = exit_code(pid, started)
            # Its children would keep its devices.
            kill_group(pid)
            end_like(_UNKNOWN_EXIT_CODE if code is None else code)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
