"""The metrics of dynamo-local: name, kind, help and labels of each.

The label `model` is the name of an endpoint, or the first name of the graph's own model. It is empty, which to
Prometheus is the same as absent, for processes that work for all models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dynamo_local.core.messages.metrics import MetricFamily
from dynamo_local.core.metrics.shares import Across


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
