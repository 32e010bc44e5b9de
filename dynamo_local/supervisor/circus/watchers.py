"""Specs of watchers, as circusd gets them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dynamo_local.process.ancestry import DEATH_PIPE_ENV, PARENT_PID_ENV
from dynamo_local.supervisor.circus.adopted import adoption
from dynamo_local.supervisor.server.launch.templates import WatcherPlan
from state.machine.processes import Process
from state.paths import StatePaths

_GRACEFUL_TIMEOUT_S = 5.0
"""For a process that circusd stops itself. Normally the supervisor has ended the process before."""

# The shell opens the log, for its owner alone, and is then replaced by the program. Through circusd's own pipes a dying
# process would lose its last lines, and stdout and stderr could not share a file that is rotated.
_LOG_AND_EXEC = 'old=$(umask); umask 077; exec >>"$1" 2>&1; umask "$old"; shift; exec "$@"'


@dataclass(frozen=True)
class WatcherSpec:
    """A watcher as circusd runs it. Output of its process is appended to `log`."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    working_dir: Path
    log: Path

    def properties(self, start: bool) -> dict[str, Any]:
        """The properties of circus's `add` command."""
        return {
            "name": self.name,
            "cmd": "/bin/sh",
            "args": ["-c", _LOG_AND_EXEC, "sh", str(self.log), *self.argv],
            "start": start,
            "waiting": True,
            "options": {
                "singleton": True,
                # The restarter decides on restarts: it knows of back-off, and of errors that a restart cannot help.
                "respawn": False,
                "max_retry": 1,
                "copy_env": True,
                "env": dict(self.environment),
                "working_dir": str(self.working_dir),
                "graceful_timeout": _GRACEFUL_TIMEOUT_S,
            },
        }


@dataclass(frozen=True)
class WatcherSpecs:
    """Makes the specs of one server's watchers. `death_pipe`: address of the pipe on whose end their processes end."""

    paths: StatePaths
    death_pipe: str
    working_dir: Path

    def of(self, plan: WatcherPlan) -> WatcherSpec:
        """The spec of a planned watcher."""
        environment = {**plan.environment, DEATH_PIPE_ENV: self.death_pipe}
        return WatcherSpec(plan.name, plan.argv, environment, self.working_dir, self.paths.log_file(plan.name))

    def adopting(self, plan: WatcherPlan, process: Process, circusd_pid: int) -> WatcherSpec:
        """The spec of a watcher whose process runs already, for the circusd of that pid."""
        spec = self.of(plan)
        return replace(
            spec,
            argv=adoption(process.pid, process.start_time, plan.argv),
            environment={**spec.environment, PARENT_PID_ENV: str(circusd_pid)},
        )
