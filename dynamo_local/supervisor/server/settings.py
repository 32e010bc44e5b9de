"""Deadlines of a server, the request to stop it, and the signals that make one."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass, field

from dynamo_local.core.endpoints.turns import TURN_S
from dynamo_local.core.process.restarts import CircusDeadlines, RestartLimits
from dynamo_local.core.usage import KEEP_DAYS


@dataclass(frozen=True)
class ServerSettings:
    """Deadlines of a server.

    `bus_deadline_s`: for NATS to come up. `ready_deadline_s`: for all services to be ready (a large model loads for
    minutes). `drain_deadline_s`: for each service to end by itself. `quit_deadline_s`: for circusd to end. `turn_s`:
    how long an endpoint with requests keeps its devices while others wait for them. `usage_days`: for which it is kept
    what requests have used. `restart_delay_max_s`: the longest
    wait before a service that keeps dying is started again. `circus_deadlines`: for a circusd that does not answer.
    """

    bus_deadline_s: float = 15.0
    ready_deadline_s: float = 600.0
    drain_deadline_s: float = 30.0
    quit_deadline_s: float = 10.0
    turn_s: float = TURN_S
    usage_days: int = KEEP_DAYS
    restart_delay_max_s: float = RestartLimits.max_delay_s
    circus_deadlines: CircusDeadlines = field(default_factory=CircusDeadlines)


@dataclass
class StopRequest:
    """A request from outside to stop: `wanted` ends the server in order, `hurry` cuts every wait short."""

    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)


def handled_signals() -> tuple[signal.Signals, ...]:
    """Signals that end the server. SIGHUP is not among them where it is ignored already, as by nohup."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hangup)
