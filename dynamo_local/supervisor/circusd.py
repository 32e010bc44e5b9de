"""`python -m dynamo_local.supervisor.circusd CONFIG`: stock circusd, whose processes stay in its session, and which
sees at once that one has ended.

circus makes each process that it starts the leader of a session. Linux shares a core among sessions first
(sched_autogroup, on in most distributions), and only then within each: where engines leave no core idle, what was awake
for moments only, the bus for one, waited up to half a second for its share. Engines, which compute, lead sessions of
their own (runtime/processes.py).
"""

from __future__ import annotations

import os
from typing import Any

from circus.circusd import main

from dynamo_local.supervisor.child_ends import look_when_children_end


def _lead_a_group() -> None:
    os.setpgid(0, 0)


if __name__ == "__main__":
    # Through a name of no type: mypy sees no more than that a function is assigned. Nothing else in circus calls it,
    # unless it is to be a daemon.
    module: Any = os
    module.setsid = _lead_a_group
    look_when_children_end()
    main()
