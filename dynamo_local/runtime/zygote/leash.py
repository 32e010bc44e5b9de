"""Ties a forked process to its launcher, which is not its parent: neither outlives the other.

Two pipes. The launcher holds the writing end of the first and never writes: when it closes, because the launcher ended
in whatever way, the kernel kills the child. The child writes its exit code into the second as its last word, for the
case that there is no nursery any more to tell it.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
from dataclasses import dataclass

_F_SETSIG = 10  # fcntl.h; Python knows the name on some builds only


@dataclass(frozen=True)
class Leash:
    """The launcher's ends, and those that it gives away."""

    held: int
    word: int
    childs: tuple[int, int]

    @classmethod
    def make(cls) -> Leash:
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


def put_on(collar: int) -> None:
    """Have the kernel SIGKILL this process when the launcher's end of the pipe closes. If it has, end here."""
    fcntl.fcntl(collar, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(collar, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(collar, fcntl.F_SETFL, fcntl.fcntl(collar, fcntl.F_GETFL) | os.O_ASYNC)
    poller = select.poll()
    poller.register(collar, 0)
    if poller.poll(0):
        os._exit(1)


def say(speech: int, code: int) -> None:
    """The child's last word. Its launcher may be gone; then it is itself as good as dead."""
    try:
        os.write(speech, bytes([code & 0xFF]))
    except BrokenPipeError:
        return
