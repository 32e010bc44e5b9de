"""The faults that are measured: what is done to which process or file, and for how long. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STOP_S = 12.0
"""Longer than any patience for a process that only says nothing."""

HUNG_AFTER_S = 10
"""`stall-timeout-s` where an engine hangs."""


@dataclass(frozen=True)
class Fault:
    """Which process gets which signal, or which file becomes what. With neither nothing is done: what the machine does
    by itself."""

    title: str
    part: str = ""
    """Of the server, as `parts.py` names it."""
    number: signal.Signals | None = None
    lasts_s: float = 0.0
    """A process that is stopped goes on then; 0: it does not, or the signal ends it."""
    keeps: int | None = None
    """Bytes of the statefile that stay, as a share of 100; None: it is left alone, -1: it is removed."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the server: those that differ have a server of their own."""

    @property
    def replaces(self) -> bool:
        """Whether the process has to be gone before all can be as it was."""
        return self.number is not None and not self.lasts_s


_KILLED = {
    "host": "worker's host",
    "launcher": "worker's launcher",
    "engine-core": "worker's EngineCore",
    "engine-worker": "worker's Worker",
    "router": "router",
    "frontend": "frontend",
    "planner": "planner",
    "nats": "NATS",
    "circusd": "circusd",
    "forkserver": "fork server",
}
_STOPPED = {
    "host": "worker's host",
    "launcher": "worker's launcher",
    "engine-core": "worker's EngineCore",
    "router": "router",
    "frontend": "frontend",
    "nats": "NATS",
    "circusd": "circusd",
    "forkserver": "fork server",
    "serve": "`dynamo serve`",
}

FAULTS: Mapping[str, Fault] = {
    "nothing": Fault("nothing"),
    **{f"kill-{part}": Fault(f"{title} killed", part, signal.SIGKILL) for part, title in _KILLED.items()},
    **{
        f"stop-{part}": Fault(f"{title} stopped for {STOP_S:g} s", part, signal.SIGSTOP, STOP_S)
        for part, title in _STOPPED.items()
    },
    "term-host": Fault("worker told to end (SIGTERM)", "host", signal.SIGTERM),
    "statefile-brace": Fault("statefile damaged: `{`", keeps=0),
    "statefile-cut": Fault("statefile cut in half", keeps=50),
    "statefile-gone": Fault("statefile removed", keeps=-1),
    "hang-engine": Fault(
        f"worker's EngineCore stopped for good, `stall-timeout-s` {HUNG_AFTER_S}",
        "engine-core",
        signal.SIGSTOP,
        settings={"VllmWorker.stall-timeout-s": HUNG_AFTER_S},
    ),
}
"""By their names on the command line."""
