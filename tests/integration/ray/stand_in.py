"""A stand-in for the node server. Its order names the file that it writes facts to; without an order it fails."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from dynamo_local.process.ancestry import die_as_environment_says

die_as_environment_says()
order = sys.stdin.read()
if not order:
    print("[  0.0s] NATS", file=sys.stderr)
    print("error: NATS cannot be reached; check the address", file=sys.stderr)
    sys.exit(1)
facts = {
    "pid": os.getpid(),
    "agent": os.getppid(),
    "arguments": sys.argv[1:],
    "environment": dict(os.environ),
    "niceness": os.getpriority(os.PRIO_PROCESS, 0),
}
Path(order).write_text(json.dumps(facts))
print("ready", flush=True)
signal.pause()
