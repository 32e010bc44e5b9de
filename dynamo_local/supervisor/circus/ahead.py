"""Starts circusd before what it needs is known: it imports meanwhile. Imports little, to begin that at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dynamo_local.process.ancestry import PARENT_PID_ENV

_NOT_FOR_CHILDREN = ("NATS_SERVER", "NATS_TOKEN")
"""Environment variables that may hold a secret. Services do not need them: they read the address from bus.json."""


@dataclass(frozen=True)
class CircusAhead:
    """A circusd that has not been told what to do. It ends with the thread that has launched it, and where it is told
    nothing with this process."""

    process: subprocess.Popen[bytes]

    @classmethod
    def launch(cls, environment: Mapping[str, str]) -> CircusAhead:
        """Start the process. Call on the main thread. What it writes goes where that of this process goes until
        `begin`."""
        process = subprocess.Popen(
            (sys.executable, "-m", "dynamo_local.supervisor.circus.circusd"),
            stdin=subprocess.PIPE,
            env=_inherited(environment) | {PARENT_PID_ENV: str(os.getpid())},
            start_new_session=True,
        )
        return cls(process)

    def begin(self, config: Path, log: Path, environment: Mapping[str, str]) -> None:
        """Have it run. `environment`: for it and its processes. `log`: a file, to which its output is appended."""
        order = {"config": str(config), "log": str(log), "environment": _inherited(environment)}
        assert self.process.stdin is not None
        # If it has ended, whoever waits for it hears of that.
        with suppress(BrokenPipeError), self.process.stdin as stdin:
            stdin.write(json.dumps(order).encode())


def _inherited(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in _NOT_FOR_CHILDREN}
