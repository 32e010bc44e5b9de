"""What the endpoints of one server have in common."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_local.core.messages.events import Event
from dynamo_local.core.planning.actions import AddWorker
from dynamo_local.supervisor.endpoints.awake import KeptUsage
from dynamo_local.supervisor.endpoints.kept_registry import KeptRegistry
from dynamo_local.supervisor.endpoints.revisions.tools import RevisionTools
from dynamo_local.supervisor.places.capacity import Startable
from dynamo_local.supervisor.server.reports.report import Report
from state.statefile.model import State

if TYPE_CHECKING:
    from dynamo_local.supervisor.endpoints.endpoint import EndpointRun


@dataclass(frozen=True)
class EndpointTools:
    """What the endpoints of one server have in common.

    `startable(endpoint, state, wanted)`: for how many of these workers there are devices. `publish`: write the board
    now. `touch`: write it soon. `happened(endpoint, what, why)`: for the event log and the terminal, as `record` is,
    for events with more facts. `looked(run)` is told of every look. `usage`: when endpoints were used.
    """

    kept: KeptRegistry
    revisions: RevisionTools
    startable: Callable[[str, State, Sequence[AddWorker]], Awaitable[Startable]]
    publish: Callable[[], Awaitable[None]]
    touch: Callable[[], None]
    happened: Callable[[str, str, str], None]
    record: Callable[[Event], None]
    looked: Callable[[EndpointRun], None]
    usage: KeptUsage
    report: Report
    wall_clock: Callable[[], float]
    clock: Callable[[], float] = time.monotonic
