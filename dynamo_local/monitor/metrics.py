"""What is known of the graph and of endpoints at one moment, and the values of the metrics in it. What is unknown has
no value.

The frontend's /metrics has the metrics of the whole server, since the frontend receives all presences.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import get_args

from dynamo_local.core.endpoints.awake.idling import AT_START, RestCause, WakeCause
from dynamo_local.core.fleet.view import AGGREGATED_ROLE, DECODE_ROLE, ENGINE_ROLES, PREFILL_ROLE
from dynamo_local.core.histogram import Histogram
from dynamo_local.core.messages.endpoints import EndpointState, EndpointView
from dynamo_local.core.messages.planner import PlannerReport
from dynamo_local.core.messages.prefill import QueueLength
from dynamo_local.core.messages.presence import Counts, EngineInfo, Load, Presence, ProcessState
from dynamo_local.core.migration.protocol import REASONS, MigrationOutcome
from dynamo_local.core.usage.records import UsageRecord
from dynamo_local.core.usage.totals import FAILED_FROM
from dynamo_local.monitor.families import (
    ASSIGNMENTS,
    COLD,
    ENDPOINT_PARKED,
    ENDPOINT_PARKS,
    ENDPOINT_READY,
    ENDPOINT_SLEEPS,
    ENDPOINT_STATE,
    ENDPOINT_SWAPS,
    ENDPOINT_WAKES,
    ENDPOINT_WANTED,
    HELD,
    IN_FLIGHT,
    INDEX_BLOCKS,
    KV_BLOCKS,
    KV_PINNED,
    KV_USAGE,
    MAX_RUNNING,
    MIGRATIONS,
    OUT_OF_STEP,
    OUTPUT_TOKENS,
    PLANNER_ACTS,
    PLANNER_CHANGING,
    PLANNER_DECISIONS,
    PLANNER_DEVICES,
    PLANNER_ENDPOINT_WORKERS,
    PLANNER_KV_USAGE,
    PLANNER_MAX_DEVICES,
    PLANNER_WORKERS,
    PREDICTED_TOKENS,
    PREEMPTED_TOKENS,
    PREFILL_S,
    PREFILLS,
    PROCESS_STARTS,
    PROCESS_STATE,
    PROCESS_UPTIME,
    PROMPT_TOKENS,
    PULL_TOKENS,
    PULLED_BYTES,
    PULLED_TOKENS,
    QUEUE,
    RECOMPUTED_TOKENS,
    REFUSED,
    ROUTED_TOKENS,
    RUNNING,
    TAKEN,
    USAGE_CACHED,
    USAGE_OUTPUT,
    USAGE_PROMPT,
    USAGE_REQUESTS,
    USAGE_SECONDS,
    WAITING,
    WORKERS,
    Metric,
)

_ROUTER_COUNTS = {
    ROUTED_TOKENS: "routed_tokens",
    PREDICTED_TOKENS: "predicted_tokens",
    PULL_TOKENS: "pull_tokens",
    INDEX_BLOCKS: "index_blocks",
    OUT_OF_STEP: "out_of_step",
}
"""Metrics of routers, with the names of their counts."""
ByClass = tuple[str, str]
"""A model and a class of priority."""
MOST_KEYS = 1000
"""Keys that have series of their own. What later ones use counts in the totals alone."""
_Series = tuple[Metric, tuple[str, ...]]


@dataclass(frozen=True)
class Snapshot:
    """A graph or a revision of an endpoint at one moment. `at` is CLOCK_MONOTONIC, in seconds. None: unknown, or there
    is no such part."""

    at: float
    members: tuple[Presence, ...] = ()
    routable: frozenset[str] = frozenset()
    """Leases of the processes that may be given work, in any role."""
    starts: Counter[str] = field(default_factory=Counter)
    """Number of processes of each watcher since the watch began."""
    queue: QueueLength | None = None
    planner: PlannerReport | None = None
    decisions: Counter[bool] = field(default_factory=Counter)
    """Number of the planner's decisions since the watch began, by whether they had outcomes."""


@dataclass(frozen=True)
class Sample:
    metric: Metric
    labels: tuple[str, ...]
    value: float


@dataclass(frozen=True)
class FrontendState:
    """Values of a model that only the frontend itself has. `requests`: in flight. `roles`: of its services. `prefills`:
    counts by outcome. `migrations`: counts by outcome and reason; `pulled_tokens` and `pulled_bytes` by migrations.
    `cold_conversations`: requests whose conversation had been cached."""

    requests: int
    roles: Sequence[str] = ()
    prefills: Mapping[str, int] | None = None
    migrations: Mapping[tuple[str, str], int] | None = None
    pulled_tokens: int | None = None
    pulled_bytes: int | None = None
    cold_conversations: int = 0


@dataclass(frozen=True)
class ModelState:
    """What the frontend knows of a model that it serves, or of one revision of it. `frontend` is None in a graph
    without a model of its own, whose snapshot has the processes that work for all models."""

    model: str
    snapshot: Snapshot
    frontend: FrontendState | None = None


@dataclass(frozen=True)
class Distribution:
    """A histogram to expose. Those of one metric with the same labels are added up."""

    metric: Metric
    labels: tuple[str, ...]
    histogram: Histogram


def samples(
    models: Iterable[ModelState],
    endpoints: Iterable[EndpointView] = (),
    held: Mapping[ByClass, int] = MappingProxyType({}),
    refused: Mapping[tuple[str, str, str], int] = MappingProxyType({}),
) -> Iterator[Sample]:
    """Return all known values, each series once. `held`: by model and class, the requests that wait for its first
    worker. `refused`: those that found no room, by model, class and bound.

    Two revisions of an endpoint are two of the `models` with one name; their values are added up.
    """
    totals: dict[tuple[Metric, tuple[str, ...]], float] = {}
    for state in models:
        yield from _of_processes(state)
        for sample in _of_model(state):
            series = sample.metric, sample.labels
            totals[series] = totals.get(series, 0.0) + sample.value
    for (metric, labels), value in totals.items():
        yield Sample(metric, labels, value)
    for by_class, number in held.items():
        yield Sample(HELD, by_class, number)
    for of_bound, number in refused.items():
        yield Sample(REFUSED, of_bound, number)
    for endpoint in endpoints:
        yield from _of_endpoint(endpoint)


def _of_processes(state: ModelState) -> Iterator[Sample]:
    """Values of watchers and of the planner, of which each belongs to one snapshot."""
    snapshot = state.snapshot
    for presence in snapshot.members:
        yield from _of_process(presence, state.model, snapshot.at)
    for watcher, starts in sorted(snapshot.starts.items()):
        yield Sample(PROCESS_STARTS, (watcher,), starts)
    if snapshot.planner is not None:
        yield from _of_planner(snapshot.planner)
    for changed, count in sorted(snapshot.decisions.items()):
        yield Sample(PLANNER_DECISIONS, ("yes" if changed else "no",), count)


def _of_model(state: ModelState) -> Iterator[Sample]:
    """Values that revisions of a model share."""
    model, snapshot, frontend = (state.model,), state.snapshot, state.frontend
    yield from _of_roles(state)
    yield from _of_router(snapshot.members)
    if snapshot.queue is not None:
        yield Sample(QUEUE, (*model, "waiting"), snapshot.queue.waiting)
        yield Sample(QUEUE, (*model, "in_hand"), snapshot.queue.in_hand)
    if frontend is None:
        return
    yield Sample(IN_FLIGHT, model, frontend.requests)
    yield Sample(COLD, model, frontend.cold_conversations)
    for outcome, count in sorted((frontend.prefills or {}).items()):
        yield Sample(PREFILLS, (*model, outcome), count)
    if frontend.migrations is not None:
        # All series exist from the start, with 0: a series that appears with 1 has no increase for `rate()`.
        for outcome, reason in itertools.product(MigrationOutcome, REASONS):
            yield Sample(MIGRATIONS, (*model, outcome, reason), frontend.migrations.get((outcome, reason), 0))
    yield from _known(model, {PULLED_TOKENS: frontend.pulled_tokens, PULLED_BYTES: frontend.pulled_bytes})


def _of_endpoint(endpoint: EndpointView) -> Iterator[Sample]:
    spec, status = endpoint.spec, endpoint.status
    for state in get_args(EndpointState):
        yield Sample(ENDPOINT_STATE, (spec.name, state), state == status.state)
    if spec.adapter_of is not None:
        return  # the workers are those of the other endpoint
    role = DECODE_ROLE if spec.disaggregated else AGGREGATED_ROLE
    yield Sample(ENDPOINT_WANTED, (spec.name, role), status.wanted)
    yield Sample(ENDPOINT_READY, (spec.name, role), status.ready)
    yield Sample(ENDPOINT_PARKED, (spec.name,), status.parked)
    yield from _of_history(endpoint)
    if spec.disaggregated:
        yield Sample(ENDPOINT_WANTED, (spec.name, PREFILL_ROLE), status.wanted_prefill)
        yield Sample(ENDPOINT_READY, (spec.name, PREFILL_ROLE), status.ready_prefill)


def _of_history(endpoint: EndpointView) -> Iterator[Sample]:
    """All series exist from the start, as those of migrations do."""
    name, history = endpoint.spec.name, endpoint.history
    rests = [cause for cause in get_args(RestCause) if cause not in ("", AT_START)]
    for cause in rests:
        yield Sample(ENDPOINT_SLEEPS, (name, cause), history.sleeps.get(cause, 0))
    for cause in ("idle", "order"):
        yield Sample(ENDPOINT_PARKS, (name, cause), history.parks.get(cause, 0))
    for cause in get_args(WakeCause):
        yield Sample(ENDPOINT_WAKES, (name, cause), history.wakes.get(cause, 0))
    yield Sample(ENDPOINT_SWAPS, (name,), history.swaps)


def _of_process(presence: Presence, model: str, now: float) -> Iterator[Sample]:
    is_worker = presence.role in ENGINE_ROLES
    labels = (model if is_worker else "", presence.watcher, presence.component, presence.role)
    for state in get_args(ProcessState):
        yield Sample(PROCESS_STATE, (*labels, state), state == presence.state)
    if presence.started_at is not None:
        yield Sample(PROCESS_UPTIME, labels, now - presence.started_at)
    if is_worker:
        yield from _of_worker(presence, model)


def _of_worker(presence: Presence, model: str) -> Iterator[Sample]:
    load, engine, counts = presence.load or Load(), presence.engine, presence.counts or Counts()
    yield from _known(
        (model, presence.watcher, presence.role),
        {
            RUNNING: load.running,
            WAITING: load.waiting,
            KV_USAGE: load.kv_usage,
            KV_PINNED: load.kv_pinned,
            PREEMPTED_TOKENS: load.preempted_tokens,
            RECOMPUTED_TOKENS: load.recomputed_tokens,
            **_sizes(engine),
            TAKEN: counts.requests,
            PROMPT_TOKENS: counts.prompt_tokens,
            OUTPUT_TOKENS: counts.output_tokens,
            PREFILL_S: counts.prefill_s,
        },
    )


def _sizes(engine: EngineInfo | None) -> dict[Metric, float]:
    return {} if engine is None else {KV_BLOCKS: engine.kv_blocks, MAX_RUNNING: engine.max_num_seqs}


def _of_roles(state: ModelState) -> Iterator[Sample]:
    members, routable = state.snapshot.members, state.snapshot.routable
    known = () if state.frontend is None else state.frontend.roles
    for role in sorted(ENGINE_ROLES & {*(member.role for member in members), *known}):
        number = sum(member.role == role and member.lease in routable for member in members)
        yield Sample(WORKERS, (state.model, role), number)


def _of_router(members: Sequence[Presence]) -> Iterator[Sample]:
    counts = [member.counts for member in members if member.counts is not None]
    for outcome in ("assigned", "unassigned"):
        by_policy: Counter[str] = Counter()
        for one in counts:
            if (count := getattr(one, outcome)) is not None:
                by_policy[one.policy or ""] += count
        for policy, number in by_policy.items():
            yield Sample(ASSIGNMENTS, (outcome, policy), number)
    for metric, name in _ROUTER_COUNTS.items():
        known = [count for one in counts if (count := getattr(one, name)) is not None]
        if known:
            # All routers know of the same blocks and workers.
            yield Sample(metric, (), sum(known) if metric.kind == "counter" else max(known))


def _of_planner(report: PlannerReport) -> Iterator[Sample]:
    yield from _known(
        (),
        {
            PLANNER_ACTS: report.acts,
            PLANNER_CHANGING: report.changing is not None,
            PLANNER_DEVICES: report.devices,
            PLANNER_MAX_DEVICES: report.max_devices,
        },
    )
    for role in report.roles:
        for standing in ("routable", "starting", "parked", "retiring"):
            yield Sample(PLANNER_WORKERS, (role.role, standing), getattr(role, standing))
        yield from _known((role.role,), {PLANNER_KV_USAGE: role.usage})
    for each in report.endpoints:
        for number in ("ordered", "wanted", "share"):
            yield from _known((each.endpoint, each.role, number), {PLANNER_ENDPOINT_WORKERS: getattr(each, number)})


def _known(labels: tuple[str, ...], values: Mapping[Metric, float | None]) -> Iterator[Sample]:
    for metric, value in values.items():
        if value is not None:
            yield Sample(metric, labels, value)


class UsageCounts:
    """Counts by model, and by model and key."""

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._keys: set[str] = set()
        self._totals: dict[_Series, float] = {}
        self._by_key: dict[_Series, float] = {}

    def note(self, record: UsageRecord) -> None:
        """Count a request."""
        self._add(self._totals, record, "")
        key = record.key or ""
        if len(self._keys) < self._most_keys:
            self._keys.add(key)
        if key in self._keys:
            self._add(self._by_key, record, key)

    def samples(self, *, by_key: bool) -> Iterator[Sample]:
        """Return the counts by model; with `by_key`, which is for administrators, by model and key instead."""
        for (metric, labels), value in (self._by_key if by_key else self._totals).items():
            yield Sample(metric, labels, value)

    @staticmethod
    def _add(counts: dict[_Series, float], record: UsageRecord, key: str) -> None:
        outcome = "failed" if record.status >= FAILED_FROM else "ok"
        labels = record.endpoint, key
        for series, value in (
            ((USAGE_REQUESTS, (*labels, outcome)), record.requests),
            ((USAGE_PROMPT, labels), record.prompt),
            ((USAGE_CACHED, labels), record.cached),
            ((USAGE_OUTPUT, labels), record.output),
            ((USAGE_SECONDS, labels), record.seconds),
        ):
            counts[series] = counts.get(series, 0.0) + value
