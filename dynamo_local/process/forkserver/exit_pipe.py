"""Ties a forked process to its launcher, which is not its parent, so that neither outlives the other.

There are two pipes. The first is a death pipe (process/death_pipe.py), whose writing end the launcher holds. Into the
second the child writes its exit code, which the launcher reads if the fork server is gone and cannot tell it.
"""

from __future__ import annotations

import os
import select


class ExitPipe:
    """The descriptors of both pipes. `for_child`: the ends of the child, which the launcher sends to it: that of the
    death pipe, and the one to write the exit code to."""

    def __init__(self, death_pipe: int, exit_code: int, for_child: tuple[int, int]) -> None:
        self.death_pipe = death_pipe
        self.exit_code = exit_code
        self.for_child = for_child

    @classmethod
    def make(cls) -> ExitPipe:
        childs_death_pipe, death_pipe = os.pipe2(os.O_CLOEXEC)
        exit_code, childs_exit_code = os.pipe2(os.O_CLOEXEC)
        return cls(death_pipe, exit_code, (childs_death_pipe, childs_exit_code))

    def close_childs(self) -> None:
        """Close the child's ends in the launcher, once they were sent."""
        for descriptor in self.for_child:
            os.close(descriptor)

    def close(self) -> None:
        """Close the launcher's own ends. The kernel kills a child that has the others."""
        for descriptor in (self.death_pipe, self.exit_code):
            os.close(descriptor)

    def read_exit_code(self) -> int | None:
        """The child's exit code; None if it ended without writing one. Call once the child is gone."""
        ready, _, _ = select.select([self.exit_code], [], [], 0)
        written = os.read(self.exit_code, 1) if ready else b""
        return written[0] if written else None


def write_exit_code(descriptor: int, code: int) -> None:
    """Write the child's exit code for its launcher. Harmless if the launcher is gone."""
    try:
        os.write(descriptor, bytes([code & 0xFF]))
    except BrokenPipeError:
        return
