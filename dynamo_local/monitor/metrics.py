"""The metrics of dynamo-local: name, kind, help and labels of each, and their values in snapshots of the graph and of
endpoints. What is unknown has no value.

The frontend's /metrics has the metrics of the whole server, since the frontend receives all presences. The label
`model` is the name of an endpoint, or the first name of the graph's own model. It is empty, which to Prometheus is the
same as absent, for processes that work for all models.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

from dynamo_local.core.endpoints.idling import AT_START, RestCause, WakeCause
from dynamo_local.core.fleet.view import AGGREGATED_ROLE, DECODE_ROLE, ENGINE_ROLES, PREFILL_ROLE
from dynamo_local.core.histogram import Histogram
from dynamo_local.core.messages.endpoints import EndpointState, EndpointView
from dynamo_local.core.messages.presence import Counts, EngineInfo, Load, Presence, ProcessState
from dynamo_local.core.messages.reports import MetricFamily, PlannerReport
from dynamo_local.core.messages.work import QueueLength
from dynamo_local.core.metrics.shares import Across
from dynamo_local.core.migration.protocol import REASONS, MigrationOutcome
from dynamo_local.core.usage.records import UsageRecord
from dynamo_local.core.usage.totals import FAILED_FROM


@dataclass(frozen=True)
class Metric:
    """A metric under /metrics. Names of counters end in `_total`; counters restart with the process that counts.

    `each`: each frontend counts what it does itself. The others are of the server: each frontend knows them.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    each: bool = False


_PROCESS = ("model", "watcher", "component", "role")
_WORKER = ("model", "watcher", "role")
_CLASS = ("model", "class")

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
WORKERS = Metric("dynamo_workers", "gauge", "Workers that may be given requests", ("model", "role"))
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
PREEMPTED_TOKENS = Metric(
    "dynamo_worker_preempted_tokens",
    "gauge",
    "Contexts of requests that wait although they have run: their KV was given to others",
    _WORKER,
)
RECOMPUTED_TOKENS = Metric(
    "dynamo_worker_recomputed_tokens_total",
    "counter",
    "Contexts whose KV was given to other requests: tokens that are computed again",
    _WORKER,
)
PREFILL_S = Metric(
    "dynamo_worker_prefill_seconds_total",
    "counter",
    "Time with requests that had no first token yet",
    _WORKER,
)
IN_FLIGHT = Metric(
    "dynamo_frontend_requests_in_flight", "gauge", "Requests that are not answered yet", ("model",), each=True
)
HELD = Metric(
    "dynamo_frontend_requests_held",
    "gauge",
    "Requests that wait for a first worker, by class of priority",
    _CLASS,
    each=True,
)
REFUSED = Metric(
    "dynamo_frontend_refused_requests_total",
    "counter",
    "Requests refused for want of room, by class of priority. `bound`: the setting, max-requests or max-held",
    (*_CLASS, "bound"),
    each=True,
)
HOLD_SECONDS = Metric(
    "dynamo_frontend_hold_seconds",
    "histogram",
    "Time for which requests waited so. `woken`: how the endpoint was idle (parked, asleep), or no; `outcome`: served, "
    "refused, or left by the client",
    ("model", "woken", "outcome"),
    each=True,
)
COLD = Metric(
    "dynamo_frontend_cold_conversations_total",
    "counter",
    "Requests of conversations that were answered before, and whose cache was dropped since: no worker had kept it",
    ("model",),
    each=True,
)
USAGE_REQUESTS = Metric(
    "dynamo_usage_requests_total",
    "counter",
    "Requests that a model was asked; failed: answered with an error, or left by the client. With the key of an "
    "administrator, this and the next four are shown for each API key, otherwise without `key`",
    ("model", "key", "outcome"),
    each=True,
)
USAGE_PROMPT = Metric(
    "dynamo_usage_prompt_tokens_total",
    "counter",
    "Prompt tokens as answers tell them: of several choices once, cached or not",
    ("model", "key"),
    each=True,
)
USAGE_CACHED = Metric(
    "dynamo_usage_cached_tokens_total",
    "counter",
    "Those of them that a worker had in its KV cache",
    ("model", "key"),
    each=True,
)
USAGE_OUTPUT = Metric("dynamo_usage_output_tokens_total", "counter", "Tokens of answers", ("model", "key"), each=True)
USAGE_SECONDS = Metric("dynamo_usage_seconds_total", "counter", "Time of these requests", ("model", "key"), each=True)
USAGE_PENDING = Metric(
    "dynamo_usage_pending_records",
    "gauge",
    "Records of usage that cannot be written now, and are kept in memory",
    each=True,
)
USAGE_LOST = Metric(
    "dynamo_usage_lost_records_total",
    "counter",
    "Records of usage that are lost: too many could not be written",
    each=True,
)
PREFILLS = Metric(
    "dynamo_prefills_total",
    "counter",
    "Decisions about remote prefill, by outcome",
    ("model", "outcome"),
    each=True,
)
MIGRATIONS = Metric(
    "dynamo_migrations_total",
    "counter",
    "Migrations of running requests to other workers, by outcome and reason",
    ("model", "outcome", "reason"),
    each=True,
)
PULLED_TOKENS = Metric(
    "dynamo_migrations_pulled_tokens_total",
    "counter",
    "Tokens whose KV migrations have pulled",
    ("model",),
    each=True,
)
PULLED_BYTES = Metric(
    "dynamo_migrations_pulled_bytes_total",
    "counter",
    "Size of this KV, where the destinations' engines report it",
    ("model",),
    each=True,
)
MIGRATION_GAP_SECONDS = Metric(
    "dynamo_migration_gap_seconds",
    "histogram",
    "Time from the last token before a migration to the first after it",
    ("model",),
    each=True,
)
MIGRATION_GAP_STEPS = Metric(
    "dynamo_migration_gap_steps",
    "histogram",
    "The same gap, in steps of the request before the migration",
    ("model",),
    each=True,
)
QUEUE = Metric("dynamo_prefill_queue_jobs", "gauge", "Jobs in the prefill queue", ("model", "state"))
ENDPOINT_STATE = Metric(
    "dynamo_endpoint_state", "gauge", "1 for the present state of the endpoint, else 0", ("model", "state")
)
ENDPOINT_WANTED = Metric(
    "dynamo_endpoint_wanted_workers", "gauge", "Number that the endpoint's workers are brought to", ("model", "role")
)
ENDPOINT_PARKED = Metric(
    "dynamo_endpoint_parked_workers", "gauge", "Workers of the endpoint that are parked", ("model",)
)
ENDPOINT_READY = Metric(
    "dynamo_endpoint_ready_workers", "gauge", "Workers of the endpoint that take requests", ("model", "role")
)
ENDPOINT_PARKS = Metric(
    "dynamo_endpoint_parks_total",
    "counter",
    "Times that the endpoint was parked since the server started, by cause",
    ("model", "cause"),
)
ENDPOINT_SLEEPS = Metric(
    "dynamo_endpoint_sleeps_total",
    "counter",
    "Times that the endpoint fell asleep since the server started, by cause; `swap`: its devices went to another one",
    ("model", "cause"),
)
ENDPOINT_WAKES = Metric(
    "dynamo_endpoint_wakes_total",
    "counter",
    "Times that the endpoint was woken since the server started, by cause",
    ("model", "cause"),
)
ENDPOINT_SWAPS = Metric(
    "dynamo_endpoint_swaps_total",
    "counter",
    "Times that the endpoint gave devices to another one, which then had a worker, since the server started",
    ("model",),
)
ASSIGNMENTS = Metric(
    "dynamo_router_assignments_total",
    "counter",
    "Requests to the router for a worker, by outcome and the router's policy",
    ("outcome", "policy"),
)
ROUTED_TOKENS = Metric("dynamo_router_tokens_total", "counter", "Tokens of the contexts of assigned requests")
PREDICTED_TOKENS = Metric(
    "dynamo_router_predicted_cached_tokens_total",
    "counter",
    "Those of them that the router expected the worker to have in its KV cache",
)
PULL_TOKENS = Metric(
    "dynamo_router_pull_tokens_total",
    "counter",
    "Tokens of prefixes that chosen workers lacked, and were told to pull from others",
)
INDEX_BLOCKS = Metric("dynamo_router_index_blocks", "gauge", "Different KV blocks that the router knows to be cached")
OUT_OF_STEP = Metric(
    "dynamo_router_workers_out_of_step",
    "gauge",
    "Workers of which the router misses messages about their KV caches, and whom it asks",
)
PLANNER_ACTS = Metric("dynamo_planner_acts", "gauge", "1 if the planner acts, 0 if it only observes")
PLANNER_CHANGING = Metric("dynamo_planner_changing", "gauge", "1 while an action of the planner is under way, else 0")
PLANNER_WORKERS = Metric("dynamo_planner_workers", "gauge", "Workers as the planner counts them", ("role", "standing"))
PLANNER_KV_USAGE = Metric(
    "dynamo_planner_kv_usage_ratio", "gauge", "Mean KV usage of a role's workers, 0 to 1", ("role",)
)
PLANNER_ENDPOINT_WORKERS = Metric(
    "dynamo_planner_endpoint_workers",
    "gauge",
    "Workers of the endpoint: `ordered` of the server, `wanted` by its policy, `share` of the budget of devices",
    ("model", "role", "number"),
)
PLANNER_DEVICES = Metric("dynamo_planner_devices", "gauge", "Devices that all workers hold together")
PLANNER_MAX_DEVICES = Metric("dynamo_planner_max_devices", "gauge", "The planner's budget of devices")
PLANNER_DECISIONS = Metric(
    "dynamo_planner_decisions_total",
    "counter",
    "Decisions of the planner since the frontend started; `change` is `no` for those without an action",
    ("change",),
)

FRONTENDS = Metric("dynamo_frontends", "gauge", "Frontends whose metrics these are, the one that answers included")
FRONTENDS_UNREAD = Metric(
    "dynamo_frontends_unread",
    "gauge",
    "Further frontends, which have not told their metrics in time; their last known counters are in the sums",
)

METRICS: tuple[Metric, ...] = tuple(found for found in list(globals().values()) if isinstance(found, Metric))

_OF_EACH = frozenset(metric.name.removesuffix("_total") for metric in METRICS if metric.each)

_OTHER_SUMS = frozenset(
    {
        "process_virtual_memory_bytes",
        "process_resident_memory_bytes",
        "process_open_fds",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
    }
)
"""Gauges of libraries that are added up."""


def across_frontends(family: MetricFamily) -> Across:
    """Return what becomes of a metric that several frontends have. Of the server's own counters the largest value is
    shown: a frontend that was started later has counted less."""
    if not family.name.startswith("dynamo_"):
        return "sum" if family.kind != "gauge" or family.name in _OTHER_SUMS else "own"
    if family.name in _OF_EACH:
        return "sum"
    return "own" if family.kind == "gauge" else "max"


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
