"""Ties a forked process to its launcher, which is not its parent: neither outlives the other.

Two pipes. The first is a death pipe (process/death_pipe.py), whose writing end the launcher holds. The child
writes its exit code into the second as its last word, for the case that there is no fork server any more to tell it.
"""

from __future__ import annotations

import os
import select
from dataclasses import dataclass


@dataclass(frozen=True)
class ExitPipe:
    """The launcher's ends, and those that it gives away."""

    held: int
    word: int
    childs: tuple[int, int]

    @classmethod
    def make(cls) -> ExitPipe:
        collar, held = os.pipe2(os.O_CLOEXEC)
        word, speech = os.pipe2(os.O_CLOEXEC)
        return cls(held, word, (collar, speech))

    def give_away(self) -> None:
        """Close the child's ends, once it has them."""
        for descriptor in self.childs:
            os.close(descriptor)

    def last_word(self) -> int | None:
        """The child's exit code; None if it did not come to say it. Call once the child is gone."""
        ready, _, _ = select.select([self.word], [], [], 0)
        said = os.read(self.word, 1) if ready else b""
        return said[0] if said else None


def write_exit_code(speech: int, code: int) -> None:
    """The child's last word. Its launcher may be gone; then it is itself as good as dead."""
    try:
        os.write(speech, bytes([code & 0xFF]))
    except BrokenPipeError:
        return
