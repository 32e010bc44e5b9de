"""A recorder (core/planning/decision.py) that publishes the planner's reports, for `dynamo top` and metrics, and its
changes as events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from dynamo_local.bus.nats import Bus, publish_event
from dynamo_local.core.errors import BusError
from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.messages.reports import DecisionReport, EndpointReport, Event, PlannerReport, RoleReport
from dynamo_local.core.planning.actions import Action, ActionOutcome
from dynamo_local.core.planning.decision import Decision, describe
from dynamo_local.core.planning.endpoints.decide import rests
from dynamo_local.core.planning.endpoints.decision import EndpointDecision, EndpointsObservation, OrderOutcome, roles_of
from dynamo_local.core.planning.endpoints.decision import event_of as endpoint_event
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.window import Observation, WorkerSeen, mean
from dynamo_local.core.subjects import Subjects
from dynamo_local.log_once import LogOnce

_log = logging.getLogger(__name__)

EVERY_S = 1.0
"""Period of the reports, in seconds. They are repeated because nothing is pulled during an action, which may take
minutes."""

KEPT_DECISIONS = 8


class PlannerPublisher:
    """Publishes the planner's last observation and decisions. `watcher`: the planner's own; empty if it has none."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        options: PlannerOptions,
        watcher: str = "",
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._options = options
        self._watcher = watcher
        self._wall_clock = wall_clock
        self._observation: Observation | None = None
        self._endpoints: EndpointsObservation | None = None
        self._endpoint_decisions: Sequence[EndpointDecision] = ()
        self._decisions: deque[DecisionReport] = deque(maxlen=KEPT_DECISIONS)
        self._gist: tuple[str, ...] = ()
        self._events: list[Event] = []
        """Events that are not published yet."""
        self._failure = LogOnce(_log)
        self._acting: str | None = None
        self._news = asyncio.Event()

    def observed(self, observation: Observation) -> None:
        """Publish the observation soon."""
        self._observation = observation
        self._news.set()

    def decided(self, decision: Decision, outcomes: Sequence[ActionOutcome]) -> None:
        """Publish the decision and its outcomes soon."""
        now = self._wall_clock()
        told = tuple(f"{'done' if outcome.done else 'not done'}: {outcome.note}" for outcome in outcomes)
        repeats = not told and decision.gist == self._gist
        if repeats and self._decisions:
            last = self._decisions.pop()
            self._decisions.append(DecisionReport(now, decision.text, (), last.times + 1, last.began))
        else:
            self._decisions.append(DecisionReport(now, decision.text, told))
        if decision.actions and not decision.acts and not repeats:
            self._events.append(Event("planner", decision.change, decision.reasons, self._watcher))
        self._gist = () if told else decision.gist
        self._news.set()

    def endpoints_observed(self, observation: EndpointsObservation, decisions: Sequence[EndpointDecision]) -> None:
        """Publish the observation soon."""
        self._endpoints, self._endpoint_decisions = observation, decisions
        self._news.set()

    def endpoint_decided(self, decision: EndpointDecision, outcome: OrderOutcome | None) -> None:
        """Publish the decision and what became of its order soon."""
        told = () if outcome is None or outcome.done else (f"not done: {outcome.note}",)
        if decision.order is not None or told:
            self._decisions.append(DecisionReport(self._wall_clock(), decision.text, told))
            self._events.append(endpoint_event(decision, outcome))
            # The next decision about the graph's own workers repeats none that is still the last.
            self._gist = ()
        self._news.set()

    def endpoint_changed(self, event: Event) -> None:
        """Do nothing: the server has published it."""

    def acting(self, action: Action | None) -> None:
        """Report this action as under way; None: no action is."""
        self._acting = None if action is None else describe(action)
        self._news.set()

    def close(self) -> None:
        """Do nothing: no report is kept back."""

    async def run(self) -> None:
        """Publish until cancelled: each new report at once, and the last one again every `EVERY_S`."""
        while True:
            self._news.clear()
            await self.publish_events()
            if self._observation is not None or self._endpoints is not None:
                await self._publish(self.report())
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await self._news.wait()

    async def publish_events(self) -> None:
        """Publish the events of the decisions since the last call."""
        events, self._events = self._events, []
        for event in events:
            await publish_event(self._bus, self._subjects, event)

    def report(self) -> PlannerReport:
        """Return the report of the last observations and decisions."""
        observation, endpoints = self._observation, self._endpoints
        latest = observation or endpoints
        assert latest is not None, "there is an observation"
        queue = None if observation is None else observation.queue
        max_devices = self._options.limits(latest.inventory).max_devices
        assert max_devices is not None, "the options have a maximum"
        return PlannerReport(
            watcher=self._watcher,
            policy=self._options.policy,
            acts=not self._options.no_operation,
            roles=() if observation is None else _roles(observation),
            devices=latest.devices,
            max_devices=max_devices,
            queue_waiting=None if queue is None else queue.waiting,
            queue_in_hand=None if queue is None else queue.in_hand,
            changing=self._acting,
            decisions=tuple(self._decisions),
            endpoints=() if endpoints is None else endpoint_reports(endpoints, self._endpoint_decisions),
        )

    async def _publish(self, report: PlannerReport) -> None:
        try:
            await self._bus.send(self._subjects.planner, report)
        except BusError as error:
            self._failure.warn(f"the planner's report is not published: {error}")
        else:
            self._failure.clear()


def _roles(observation: Observation) -> tuple[RoleReport, ...]:
    return tuple(_role(role, observation.of_role(role)) for role in sorted(observation.templates))


def _role(role: str, workers: Sequence[WorkerSeen]) -> RoleReport:
    readings = [worker.reading for worker in workers if worker.standing == "routable" and worker.reading is not None]
    return RoleReport(
        role=role,
        routable=sum(worker.standing == "routable" for worker in workers),
        starting=sum(worker.standing == "starting" for worker in workers),
        retiring=sum(worker.standing == "retiring" for worker in workers),
        parked=sum(worker.standing == "parked" for worker in workers),
        running=sum(reading.running for reading in readings) if readings else None,
        waiting=sum(reading.waiting for reading in readings) if readings else None,
        usage=mean(reading.kv_usage for reading in readings),
    )


# Turns observations of endpoints and decisions about them into the planner's reports. Pure.


def endpoint_reports(
    observation: EndpointsObservation, decisions: Sequence[EndpointDecision]
) -> tuple[EndpointReport, ...]:
    """Return a report for each role of each endpoint, the oldest endpoint first."""
    resting = {seen.name for seen in observation.endpoints if rests(seen)}
    verdicts = {
        (each.endpoint, verdict.role): verdict
        for each in decisions
        for verdict in each.verdicts
        if each.endpoint not in resting
    }
    return tuple(
        EndpointReport(
            seen.name,
            role,
            seen.ordered(role),
            seen.ready(role),
            seen.demand(role),
            None if verdict is None else verdict.wanted,
            None if verdict is None else verdict.gets,
            0 if role == PREFILL_ROLE else seen.status.parked,
            seen.status.state,
        )
        for seen in sorted(observation.endpoints, key=lambda seen: (seen.view.created_at, seen.name))
        for role in roles_of(seen.spec)
        for verdict in (verdicts.get((seen.name, role)),)
    )
