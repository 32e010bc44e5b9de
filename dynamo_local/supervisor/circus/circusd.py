"""`python -m dynamo_local.supervisor.circus.circusd CONFIG`: stock circusd with four changes.

- Processes stay in circusd's session. circus makes each process the leader of a session of its own, and Linux shares a
  core among sessions first (sched_autogroup, on in most distributions). Where engines leave no core idle, processes
  that are awake for moments only, such as NATS, then wait up to half a second for their share. Engines, which compute,
  lead sessions of their own (process/ancestry.py).
- A signal ends circusd at once, without its processes: the server replaces it. Stock circusd would stop them all.
- circus and tornado get a clock that is never set back. By the wall clock they would look after no process until it has
  caught up.
- circusd notices at once that a process has ended (child_ends.py).
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
    """A replacement for `time.time` that starts at its value and then follows the monotonic clock."""
    set_at = time.time() - time.monotonic()
    return lambda: set_at + time.monotonic()


if __name__ == "__main__":
    # As Any: mypy would object to the assignments. circus calls setsid for its processes only, as it is no daemon here.
    module: Any = os
    module.setsid = _lead_a_group
    clocks: Any = time
    clocks.time = steady_clock()
    look_when_children_end()
    SysHandler.SIGNALS = []
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main()
