"""The metrics of dynamo-local: names, help, and values in a snapshot of the graph. What is unknown has no value.

The frontend's endpoint has the metrics of the whole graph, since the frontend receives all presences.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.messages.planner import PlannerReport
from dynamo_local.core.messages.presence import Counts, EngineInfo, Load, Presence, ProcessState
from dynamo_local.core.migration.protocol import REASONS, MigrationOutcome
from dynamo_local.monitor.graph_watch import Snapshot


@dataclass(frozen=True)
class Metric:
    """A metric under /metrics. Names of counters end in `_total`; counters restart with the process that counts."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sample:
    metric: Metric
    labels: tuple[str, ...]
    value: float


@dataclass(frozen=True)
class FrontendState:
    """Values that only the frontend itself has. `requests`: in flight. `roles`: of the graph's services. `prefills`:
    counts by outcome. `migrations`: counts by outcome and reason; `pulled_tokens` and `pulled_bytes` by migrations."""

    requests: int
    roles: Sequence[str] = ()
    prefills: Mapping[str, int] | None = None
    migrations: Mapping[tuple[str, str], int] | None = None
    pulled_tokens: int | None = None
    pulled_bytes: int | None = None


_PROCESS = ("watcher", "component", "role")
_WORKER = ("watcher", "role")

PROCESS_STATE = Metric(
    "dynamo_process_state", "gauge", "1 for the present state of the process, else 0", (*_PROCESS, "state")
)
PROCESS_UPTIME = Metric("dynamo_process_uptime_seconds", "gauge", "Time since the process started", _PROCESS)
PROCESS_STARTS = Metric(
    "dynamo_process_starts_total",
    "counter",
    "Processes of the watcher since the frontend started; above 1, the watcher has restarted its process",
    ("watcher",),
)
WORKERS = Metric("dynamo_workers", "gauge", "Workers that may be given requests", ("role",))
RUNNING = Metric("dynamo_worker_running_requests", "gauge", "Requests in the engine's batch", _WORKER)
WAITING = Metric("dynamo_worker_waiting_requests", "gauge", "Requests that wait for a place in the batch", _WORKER)
KV_USAGE = Metric("dynamo_worker_kv_usage_ratio", "gauge", "Share of KV blocks that requests use, 0 to 1", _WORKER)
KV_PINNED = Metric(
    "dynamo_worker_kv_pinned_ratio", "gauge", "Share of KV blocks kept only for other workers to read, 0 to 1", _WORKER
)
KV_BLOCKS = Metric("dynamo_worker_kv_blocks", "gauge", "Size of the KV cache, in blocks", _WORKER)
MAX_RUNNING = Metric("dynamo_worker_max_running_requests", "gauge", "Places in the batch", _WORKER)
TAKEN = Metric(
    "dynamo_worker_requests_total",
    "counter",
    "Requests taken; a request that migrates or is recovered counts at each of its workers",
    _WORKER,
)
PROMPT_TOKENS = Metric(
    "dynamo_worker_prompt_tokens_total", "counter", "Prompt tokens computed: neither cached nor pulled", _WORKER
)
OUTPUT_TOKENS = Metric("dynamo_worker_output_tokens_total", "counter", "Tokens generated", _WORKER)
PREFILL_S = Metric(
    "dynamo_worker_prefill_seconds_total",
    "counter",
    "Time with requests that had no first token yet",
    _WORKER,
)
IN_FLIGHT = Metric("dynamo_frontend_requests_in_flight", "gauge", "Requests that are not answered yet")
PREFILLS = Metric("dynamo_prefills_total", "counter", "Decisions about remote prefill, by outcome", ("outcome",))
MIGRATIONS = Metric(
    "dynamo_migrations_total",
    "counter",
    "Migrations of running requests to other workers, by outcome and reason",
    ("outcome", "reason"),
)
PULLED_TOKENS = Metric("dynamo_migrations_pulled_tokens_total", "counter", "Tokens whose KV migrations have pulled")
PULLED_BYTES = Metric(
    "dynamo_migrations_pulled_bytes_total", "counter", "Size of this KV, where the destinations' engines report it"
)
MIGRATION_GAP_SECONDS = Metric(
    "dynamo_migration_gap_seconds", "histogram", "Time from the last token before a migration to the first after it"
)
MIGRATION_GAP_STEPS = Metric(
    "dynamo_migration_gap_steps", "histogram", "The same gap, in steps of the request before the migration"
)
QUEUE = Metric("dynamo_prefill_queue_jobs", "gauge", "Jobs in the prefill queue", ("state",))
ASSIGNMENTS = Metric(
    "dynamo_router_assignments_total",
    "counter",
    "Requests to the router for a worker, by outcome",
    ("outcome",),
)
PLANNER_ACTS = Metric("dynamo_planner_acts", "gauge", "1 if the planner acts, 0 if it only observes")
PLANNER_CHANGING = Metric("dynamo_planner_changing", "gauge", "1 while an action of the planner is under way, else 0")
PLANNER_WORKERS = Metric("dynamo_planner_workers", "gauge", "Workers as the planner counts them", ("role", "standing"))
PLANNER_KV_USAGE = Metric(
    "dynamo_planner_kv_usage_ratio", "gauge", "Mean KV usage of a role's workers, 0 to 1", ("role",)
)
PLANNER_DEVICES = Metric("dynamo_planner_devices", "gauge", "Devices that all workers hold together")
PLANNER_MAX_DEVICES = Metric("dynamo_planner_max_devices", "gauge", "The planner's budget of devices")
PLANNER_DECISIONS = Metric(
    "dynamo_planner_decisions_total",
    "counter",
    "Decisions of the planner since the frontend started; `change` is `no` for those without an action",
    ("change",),
)

METRICS: tuple[Metric, ...] = tuple(found for found in list(globals().values()) if isinstance(found, Metric))


def samples(snapshot: Snapshot, frontend: FrontendState) -> Iterator[Sample]:
    """Return all known values."""
    for presence in snapshot.members:
        yield from _of_process(presence, snapshot.at)
    for watcher, starts in sorted(snapshot.starts.items()):
        yield Sample(PROCESS_STARTS, (watcher,), starts)
    yield from _of_roles(snapshot, frontend.roles)
    yield from _of_router(snapshot.members)
    if snapshot.queue is not None:
        yield Sample(QUEUE, ("waiting",), snapshot.queue.waiting)
        yield Sample(QUEUE, ("in_hand",), snapshot.queue.in_hand)
    yield Sample(IN_FLIGHT, (), frontend.requests)
    for outcome, count in sorted((frontend.prefills or {}).items()):
        yield Sample(PREFILLS, (outcome,), count)
    if frontend.migrations is not None:
        # All series exist from the start, with 0: a series that appears with 1 has no increase for `rate()`.
        for outcome, reason in itertools.product(MigrationOutcome, REASONS):
            yield Sample(MIGRATIONS, (outcome, reason), frontend.migrations.get((outcome, reason), 0))
    yield from _known((), {PULLED_TOKENS: frontend.pulled_tokens, PULLED_BYTES: frontend.pulled_bytes})
    if snapshot.planner is not None:
        yield from _of_planner(snapshot.planner)
    for changed, count in sorted(snapshot.decisions.items()):
        yield Sample(PLANNER_DECISIONS, ("yes" if changed else "no",), count)


def _of_process(presence: Presence, now: float) -> Iterator[Sample]:
    labels = (presence.watcher, presence.component, presence.role)
    for state in get_args(ProcessState):
        yield Sample(PROCESS_STATE, (*labels, state), state == presence.state)
    if presence.started_at is not None:
        yield Sample(PROCESS_UPTIME, labels, now - presence.started_at)
    if presence.role in ENGINE_ROLES:
        yield from _of_worker(presence)


def _of_worker(presence: Presence) -> Iterator[Sample]:
    load, engine, counts = presence.load or Load(), presence.engine, presence.counts or Counts()
    yield from _known(
        (presence.watcher, presence.role),
        {
            RUNNING: load.running,
            WAITING: load.waiting,
            KV_USAGE: load.kv_usage,
            KV_PINNED: load.kv_pinned,
            **_sizes(engine),
            TAKEN: counts.requests,
            PROMPT_TOKENS: counts.prompt_tokens,
            OUTPUT_TOKENS: counts.output_tokens,
            PREFILL_S: counts.prefill_s,
        },
    )


def _sizes(engine: EngineInfo | None) -> dict[Metric, float]:
    return {} if engine is None else {KV_BLOCKS: engine.kv_blocks, MAX_RUNNING: engine.max_num_seqs}


def _of_roles(snapshot: Snapshot, of_graph: Sequence[str]) -> Iterator[Sample]:
    present = {member.role for member in snapshot.members}
    for role in sorted(ENGINE_ROLES & {*present, *of_graph}):
        number = sum(member.role == role and member.lease in snapshot.routable for member in snapshot.members)
        yield Sample(WORKERS, (role,), number)


def _of_router(members: Sequence[Presence]) -> Iterator[Sample]:
    counts = [member.counts for member in members if member.counts is not None]
    for outcome in ("assigned", "unassigned"):
        known = [count for one in counts if (count := getattr(one, outcome)) is not None]
        if known:
            yield Sample(ASSIGNMENTS, (outcome,), sum(known))


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
        for standing in ("routable", "starting", "retiring"):
            yield Sample(PLANNER_WORKERS, (role.role, standing), getattr(role, standing))
        yield from _known((role.role,), {PLANNER_KV_USAGE: role.usage})


def _known(labels: tuple[str, ...], values: Mapping[Metric, float | None]) -> Iterator[Sample]:
    for metric, value in values.items():
        if value is not None:
            yield Sample(metric, labels, value)
