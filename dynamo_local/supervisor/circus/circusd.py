"""`python -m dynamo_local.supervisor.circus.circusd CONFIG`: stock circusd, whose processes stay in its
session, and which sees at once that one has ended.

circus makes each process that it starts the leader of a session. Linux shares a core among sessions first
(sched_autogroup, on in most distributions), and only then within each: where engines leave no core idle, what was awake
for moments only, the bus for one, waited up to half a second for its share. Engines, which compute, lead sessions of
their own (process/ancestry.py).

A signal ends it at once, and alone: the server goes on with another one. Told to end in order, it would stop all that
it runs.

circus and tornado wait by the wall clock. Where that is set back, they would not look after any process until it has
caught up; so theirs goes on steadily.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from circus.circusd import main
from circus.sighandler import SysHandler

from dynamo_local.supervisor.circus.child_ends import look_when_children_end


def _lead_a_group() -> None:
    os.setpgid(0, 0)


def steady_clock() -> Callable[[], float]:
    """The time of day by the clock that nobody sets: what `time.time` shows now, and as much more as passes."""
    set_at = time.time() - time.monotonic()
    return lambda: set_at + time.monotonic()


if __name__ == "__main__":
    # Through a name of no type: mypy sees no more than that a function is assigned. Nothing else in circus calls it,
    # unless it is to be a daemon.
    module: Any = os
    module.setsid = _lead_a_group
    clocks: Any = time
    clocks.time = steady_clock()
    look_when_children_end()
    SysHandler.SIGNALS = []
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main()
