"""`python -m dynamo_local.supervisor.circus.circusd < ORDER`: stock circusd with five changes.

- It imports first, and then reads what it is to do (ahead.py).
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

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from circus.circusd import main
from circus.sighandler import SysHandler

from dynamo_local.process.ancestry import die_as_environment_says
from dynamo_local.supervisor.circus.child_ends import look_when_children_end


def _lead_a_group() -> None:
    os.setpgid(0, 0)


def steady_clock() -> Callable[[], float]:
    """A replacement for `time.time` that starts at its value and then follows the monotonic clock."""
    set_at = time.time() - time.monotonic()
    return lambda: set_at + time.monotonic()


def _take_order() -> None:
    """Wait for the order, and do as it says. Ends this process if there is none: its parent needs no circusd."""
    order = json.loads(sys.stdin.buffer.read() or sys.exit(0))
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv[1:] = [order["config"]]
    nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(order["log"], os.O_WRONLY | os.O_APPEND)
    for number, opened in enumerate((nothing, log, log)):
        os.dup2(opened, number)


if __name__ == "__main__":
    die_as_environment_says()
    # As Any: mypy would object to the assignments. circus calls setsid for its processes only, as it is no daemon here.
    module: Any = os
    module.setsid = _lead_a_group
    clocks: Any = time
    clocks.time = steady_clock()
    look_when_children_end()
    SysHandler.SIGNALS = []
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _take_order()
    main()
