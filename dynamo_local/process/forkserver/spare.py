"""The spare: a fork of the fork server that waits for its death, and is forked for the next one.

    fork server ──── fork ───► spare ──── fork ───► the next fork server, for which circus starts a launcher

The next fork server has then imported everything already. The spare belongs to the server (`dynamo serve`), not to the
fork server that has made it. Whichever fork server there is makes another one when it ends.
"""

from __future__ import annotations

import os
import selectors
import sys
import time
from contextlib import suppress

from dynamo_local.core.process.restarts import LifeRecord, Restart, RestartLimits, became_ready, died
from dynamo_local.process.ancestry import die_with_holder
from dynamo_local.process.forkserver.child import set_process_title
from dynamo_local.process.forkserver.protocol import SPARE_MODULE

_LIMITS = RestartLimits(first_delay_s=0.5, max_delay_s=60.0, healthy_after_s=60.0)


class SpareOrder:
    """The order to a forked process to be the spare."""


class SpareKeeper:
    """Tells a fork server when to make a spare. `pid`: of the spare there is, from which it was forked itself; None:
    there is none yet."""

    def __init__(self, selector: selectors.BaseSelector, pid: int | None) -> None:
        self._selector = selector
        self._pidfd: int | None = None
        self._life = LifeRecord()
        self._not_before: float | None = 0.0
        if pid is not None:
            # Otherwise it has ended already.
            with suppress(ProcessLookupError):
                self.made(pid)

    def pause_s(self) -> float | None:
        """How long nothing is to be done unless something happens; None: no end."""
        if self._pidfd is not None or self._not_before is None:
            return None
        return max(self._not_before - time.monotonic(), 0.0)

    def is_due(self) -> bool:
        """Whether one is to be made now."""
        return self.pause_s() == 0.0

    def made(self, pid: int) -> None:
        """Take note of a spare. Raises ProcessLookupError if it has ended, and is no child of this process."""
        self._pidfd = os.pidfd_open(pid)
        self._selector.register(self._pidfd, selectors.EVENT_READ)
        self._life = became_ready(self._life, time.monotonic())

    def not_made(self, why: str) -> None:
        """Take note that none can be made, now or later."""
        print(f"warning: there is no spare of this fork server: {why}", flush=True)
        self._not_before = None

    def notice(self, descriptor: int) -> None:
        """Take note of a descriptor of the selector that is ready, if it is that of the spare, which has ended."""
        if descriptor != self._pidfd:
            return
        self._selector.unregister(descriptor)
        # Reaped by its parent, which may be another process.
        with suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, descriptor, os.WEXITED)
        self.close()
        self._pidfd = None
        decision, self._life = died(self._life, None, _LIMITS, time.monotonic())
        self._not_before = decision.at if isinstance(decision, Restart) else None
        print("warning: the spare of this fork server has ended", flush=True)

    def close(self) -> None:
        """Close its descriptor."""
        if self._pidfd is not None:
            os.close(self._pidfd)


def become_spare(death_pipe: str) -> None:
    """Have this forked process live as long as the server, whose death pipe has that address."""
    # The group of the fork server is killed when that has ended.
    os.setpgid(0, 0)
    die_with_holder(death_pipe, across_exec=False)
    set_process_title([os.fsencode(part) for part in (sys.executable, "-m", SPARE_MODULE)], dict(os.environb))
