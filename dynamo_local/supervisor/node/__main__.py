"""`python -m dynamo_local.supervisor.node [--state-dir DIR] [--watch-pid PID] < ORDER`: a node server (server.py).

ORDER is JSON (head.py). Prints `ready` once it answers; errors are one line on stderr that starts with `error:`, and
the exit status is that of the error. Dies with its parent, and its processes with it.
"""

from __future__ import annotations

import os
import sys

from dynamo_local.process.ancestry import die_as_environment_says
from dynamo_local.supervisor.circus.ahead import CircusAhead


def main() -> int:
    """Run until told to end. Returns the exit status."""
    die_as_environment_says()
    circusd = CircusAhead.launch(os.environ)
    # The other core, if there is one, has half a second of imports less to wait for.
    from dynamo_local.supervisor.node.server import run

    return run(circusd)


if __name__ == "__main__":
    sys.exit(main())
