"""Submissions that are kept until a worker may be asked: so an application examines a request before it is held."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar


class Deferral:
    """Keeps what one call of an application submits, until it is released. `reached`: set with the first submission."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._kept: list[Callable[[], None]] | None = []

    def apply(self) -> None:
        """Keep what is submitted from here on by this task, and by tasks that it creates."""
        _current.set(self)

    def take(self, submit: Callable[[], None]) -> None:
        """Submit now, or when released."""
        self.reached.set()
        if self._kept is None:
            submit()
        else:
            self._kept.append(submit)

    def release(self) -> None:
        """Submit what was kept, and everything that comes at once."""
        kept, self._kept = self._kept or [], None
        for submit in kept:
            submit()


_current: ContextVar[Deferral | None] = ContextVar("deferral of this call", default=None)


def submit_in_turn(submit: Callable[[], None]) -> None:
    """Submit now, or when the call of the application that this belongs to may go on."""
    deferral = _current.get()
    if deferral is None:
        submit()
    else:
        deferral.take(submit)
