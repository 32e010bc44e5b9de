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
from dynamo_local.core.planning.actions import Action, ActionOutcome, OrderOutcome, Outcome
from dynamo_local.core.planning.decide import rests
from dynamo_local.core.planning.decision import Decision, Recorder, describe, event_of_order
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.window import Fleet, Observation, WorkerSeen, mean
from dynamo_local.core.subjects import Subjects
from dynamo_local.log_once import LogOnce

_log = logging.getLogger(__name__)

EVERY_S = 1.0
"""Longest period of the reports, in seconds, however rarely there is a pull."""

KEPT_DECISIONS = 8


class PlannerPublisher(Recorder):
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
        self._made: Sequence[Decision] = ()
        """The decisions that were made at the last pull."""
        self._decisions: deque[DecisionReport] = deque(maxlen=KEPT_DECISIONS)
        self._gist: tuple[str, ...] = ()
        self._events: list[Event] = []
        """Events that are not published yet."""
        self._failure = LogOnce(_log)
        self._acting: str | None = None
        self._news = asyncio.Event()

    def observed(self, observation: Observation, decisions: Sequence[Decision]) -> None:
        """Publish the observation soon."""
        self._observation, self._made = observation, decisions
        self._news.set()

    def decided(self, decision: Decision, outcomes: Sequence[Outcome]) -> None:
        """Publish the decision and its outcomes soon. One about numbers that changes none is in no report."""
        if decision.by_actions:
            self._decided_on_actions(decision, [each for each in outcomes if isinstance(each, ActionOutcome)])
        elif decision.order is not None:
            outcome = next((each for each in outcomes if isinstance(each, OrderOutcome)), None)
            told = () if outcome is None or outcome.done else (f"not done: {outcome.note}",)
            self._decisions.append(DecisionReport(self._wall_clock(), decision.text, told))
            self._events.append(event_of_order(decision, outcome))
            # The next decision about actions repeats none that is still the last.
            self._gist = ()
        self._news.set()

    def _decided_on_actions(self, decision: Decision, outcomes: Sequence[ActionOutcome]) -> None:
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

    def acting(self, action: Action | None) -> None:
        """Report this action as under way; None: no action is."""
        self._acting = None if action is None else describe(action)
        self._news.set()

    async def run(self) -> None:
        """Publish until cancelled: each new report at once, and the last one again every `EVERY_S`."""
        while True:
            self._news.clear()
            await self.publish_events()
            if self._observation is not None:
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
        """Return the report of the last observation and decisions."""
        observation = self._observation
        assert observation is not None, "there is an observation"
        fleet = None if observation.main is None else observation.main.fleet
        queue = None if fleet is None else fleet.queue
        return PlannerReport(
            watcher=self._watcher,
            policy=self._options.policy,
            acts=not self._options.no_operation,
            roles=() if fleet is None else _roles(fleet),
            devices=observation.held,
            max_devices=self._options.max_devices(observation.inventory),
            queue_waiting=None if queue is None else queue.waiting,
            queue_in_hand=None if queue is None else queue.in_hand,
            changing=self._acting,
            decisions=tuple(self._decisions),
            endpoints=endpoint_reports(observation, self._made),
        )

    async def _publish(self, report: PlannerReport) -> None:
        try:
            await self._bus.send(self._subjects.planner, report)
        except BusError as error:
            self._failure.warn(f"the planner's report is not published: {error}")
        else:
            self._failure.clear()


def _roles(fleet: Fleet) -> tuple[RoleReport, ...]:
    return tuple(_role(role, fleet.of_role(role)) for role in sorted(fleet.templates))


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


def endpoint_reports(observation: Observation, decisions: Sequence[Decision]) -> tuple[EndpointReport, ...]:
    """Return a report for each role of each endpoint, the oldest endpoint first."""
    resting = {seen.name for seen in observation.others if rests(seen)}
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
            None if verdict is None or verdict.count is None else verdict.count.gets,
            0 if role == PREFILL_ROLE else seen.status.parked,
            seen.status.state,
        )
        for seen in observation.others
        for role in seen.roles
        for verdict in (verdicts.get((seen.name, role)),)
    )
