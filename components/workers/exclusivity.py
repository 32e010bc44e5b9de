"""A worker set apart for one request that engines may die of (core/request/suspicion.py).

It refuses all others, has the frontends take away what it works on, which they do when they see it in its presence, and
says when nothing is left. It is over when the frontend says so, when the request has ended here, and when it has not
come and nobody has asked for that any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from dynamo_local.bus.presence import Announcer
from dynamo_local.core.messages.presence import Exclusive
from dynamo_local.core.messages.work import AskExclusive, EndExclusive, RequestEpoch, Submit

ASKED_S = 5.0
"""How long a question is good for, if the request does not come. Frontends repeat it."""


class Exclusivity:
    """Of one worker. `running` are its unfinished requests, `warming` says whether it computes for guests."""

    def __init__(
        self,
        announcer: Announcer,
        running: Callable[[], Iterable[RequestEpoch]],
        warming: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._announcer = announcer
        self._running = running
        self._warming = warming
        self._clock = clock
        self._asked_at = 0.0
        self._begun = False
        """The request has come."""

    @property
    def _exclusive(self) -> Exclusive | None:
        return self._announcer.presence.exclusive

    def ask(self, word: AskExclusive) -> None:
        """Be set apart, unless it is for another request already."""
        ours = self._exclusive
        if ours is None:
            self._begun = False
            self._announcer.update(exclusive=Exclusive(word.request_id, word.frontend, free=False))
        if ours is None or _is_for(ours, word):
            self._asked_at = self._clock()
        self.look()

    def end(self, word: EndExclusive) -> None:
        """Take others again."""
        if (ours := self._exclusive) is not None and _is_for(ours, word):
            self._announcer.update(exclusive=None)

    def refuses(self, work: Submit) -> str | None:
        """Why the request is not taken, or None."""
        ours = self._exclusive
        if ours is None:
            return "the worker is not set apart for the request" if work.exclusive else None
        if not work.exclusive or not _is_for(ours, work):
            return "the worker is set apart for another request"
        self.look()
        if (ours := self._exclusive) is None or not ours.free:
            return "the worker has others to finish first"
        self._begun = True
        return None

    def look(self) -> None:
        """See who is left. To be called whenever somebody has gone, and now and then."""
        ours = self._exclusive
        if ours is None:
            return
        running = {request.request_id for request in self._running()}
        expired = not self._begun and self._clock() - self._asked_at > ASKED_S
        if expired or (self._begun and ours.request_id not in running):
            self._announcer.update(exclusive=None)
            return
        free = running <= {ours.request_id} and not self._warming()
        self._announcer.update(exclusive=Exclusive(ours.request_id, ours.frontend, free=free))


def _is_for(exclusive: Exclusive, word: AskExclusive | EndExclusive | Submit) -> bool:
    return (exclusive.request_id, exclusive.frontend) == (word.request_id, word.frontend)
