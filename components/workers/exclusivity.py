"""Sets a worker apart for one request that engines may die of (core/request/recovery.py).

The worker refuses all other requests, and announces with its presence that it is set apart; frontends then migrate the
requests that it has. It is free for the request when none of these is left. The state ends when the frontend says so,
when the request has ended, or when the request has not come and the frontend has stopped asking.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from dynamo_local.bus.presence import Announcer
from dynamo_local.core.messages.presence import Exclusive
from dynamo_local.core.messages.work import AskExclusive, EndExclusive, RequestEpoch, Submit

ASK_TTL_S = 5.0
"""A worker stays set apart for so long for a request that does not come. Frontends ask again sooner."""


class Exclusivity:
    """The exclusive state of one worker. `running` gives its unfinished requests, `warming` whether it computes warm
    requests."""

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
        """Whether the request has been submitted."""

    @property
    def _exclusive(self) -> Exclusive | None:
        return self._announcer.presence.exclusive

    def ask(self, question: AskExclusive) -> None:
        """Set the worker apart, unless it is set apart for another request already."""
        ours = self._exclusive
        if ours is None:
            self._begun = False
            self._announcer.update(exclusive=Exclusive(question.request_id, question.frontend, free=False))
        if ours is None or _is_for(ours, question):
            self._asked_at = self._clock()
        self.look()

    def end(self, order: EndExclusive) -> None:
        """Take other requests again."""
        if (ours := self._exclusive) is not None and _is_for(ours, order):
            self._announcer.update(exclusive=None)

    def refuses(self, work: Submit) -> str | None:
        """Why this worker does not take the request, or None."""
        ours = self._exclusive
        if ours is None:
            return "the worker is not set apart for the request" if work.exclusive else None
        if not work.exclusive or not _is_for(ours, work):
            return "the worker is set apart for another request"
        self.look()
        if (ours := self._exclusive) is None or not ours.free:
            return "the worker has other requests to finish first"
        self._begun = True
        return None

    def look(self) -> None:
        """Bring the state up to date. To be called whenever a request has ended, and about once a second."""
        ours = self._exclusive
        if ours is None:
            return
        running = {request.request_id for request in self._running()}
        expired = not self._begun and self._clock() - self._asked_at > ASK_TTL_S
        if expired or (self._begun and ours.request_id not in running):
            self._announcer.update(exclusive=None)
            return
        free = running <= {ours.request_id} and not self._warming()
        self._announcer.update(exclusive=Exclusive(ours.request_id, ours.frontend, free=free))


def _is_for(exclusive: Exclusive, message: AskExclusive | EndExclusive | Submit) -> bool:
    return (exclusive.request_id, exclusive.frontend) == (message.request_id, message.frontend)
