"""Which planner acts: one at a time, for as long as its process lives."""

from __future__ import annotations

from dataclasses import dataclass, field

from dynamo_local.core.errors import UsageError
from state.machine.processes import alive, start_time
from state.statefile.model import Owner


@dataclass
class ActingPlanner:
    """The planner of one server that adds and removes workers."""

    namespace: str
    _process: Owner | None = field(default=None, init=False)

    def begin(self, pid: int) -> None:
        """Have the planner of that process act. Raises UsageError while another one does, or if there is none."""
        acting = self._process
        if acting is not None and acting.pid != pid and alive(acting.pid, acting.start_time):
            raise UsageError(
                f"process {acting.pid} is the planner of namespace {self.namespace} already",
                "end it, or use --no-operation (in a graph: --Planner.no-operation=true)",
            )
        started = start_time(pid)
        if started is None:
            raise UsageError(f"there is no process {pid} on the server's machine", "run the planner there")
        self._process = Owner(pid, started)

    def check(self, pid: int) -> None:
        """Raise UsageError if the planner of that process does not act, or has ended."""
        acting = self._process
        if acting is None or acting.pid != pid or not alive(pid, acting.start_time):
            raise UsageError(f"process {pid} is not the planner that acts in namespace {self.namespace}")
