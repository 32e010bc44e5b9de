"""The values of our metrics, and how they look under /metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.histogram import Histogram
from dynamo_local.core.messages.endpoints import EndpointHistory, EndpointStatus, EndpointView
from dynamo_local.core.messages.presence import Load, Presence
from dynamo_local.core.messages.reports import EndpointReport, PlannerReport
from dynamo_local.core.messages.work import QueueLength
from dynamo_local.monitor.exposition import expose
from dynamo_local.monitor.metrics import (
    METRICS,
    MIGRATION_GAP_SECONDS,
    Distribution,
    FrontendState,
    ModelState,
    Snapshot,
    samples,
)
from tests.unit.core.messages.messages_strategies import planner_reports, presences
from tests.unit.monitor.graph import DECODE, REPORT, ROUTER, STARTING, snapshot

ROOT = Path(__file__).resolve().parents[3]
FRONTEND = FrontendState(
    requests=4,
    roles=("frontend", "router", "decode", "prefill"),
    prefills={"long": 2},
    migrations={("migrated", "drain"): 3},
    pulled_tokens=96,
    pulled_bytes=4096,
)
WHOLE = snapshot(DECODE, STARTING, ROUTER, queue=QueueLength(3, 1), planner=REPORT)


def exposed(of: Snapshot, frontend: FrontendState = FRONTEND) -> dict[tuple[str, ...], float]:
    """Series as Prometheus would read them: name and the values of labels, in the order of the names of labels."""
    return series_of([ModelState("m", of, frontend)])


def series_of(models: Iterable[ModelState], endpoints: Iterable[EndpointView] = ()) -> dict[tuple[str, ...], float]:
    registry = CollectorRegistry()
    expose(lambda: samples(models, endpoints), registry=registry)
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            series = sample.name, *(sample.labels[label] for label in sorted(sample.labels))
            # Prometheus refuses a whole scrape with a series that is there twice.
            assert series not in found
            found[series] = sample.value
    return found


def test_a_graph_is_told_of_whole() -> None:
    found = exposed(WHOLE)
    worker = ("m", "decode", "ns_VllmWorker")
    assert found["dynamo_worker_running_requests", *worker] == 3
    assert found["dynamo_worker_waiting_requests", *worker] == 1
    assert found["dynamo_worker_kv_usage_ratio", *worker] == 0.75
    assert found["dynamo_worker_kv_pinned_ratio", *worker] == 0
    assert found["dynamo_worker_kv_blocks", *worker] == 1024
    assert found["dynamo_worker_output_tokens_total", *worker] == 120
    assert found["dynamo_worker_prefill_seconds_total", *worker] == 2.5
    assert found["dynamo_process_uptime_seconds", "VllmWorker", *worker] == 125
    assert found["dynamo_process_uptime_seconds", "Router", "", "router", "ns_Router"] == 9
    assert found["dynamo_process_state", "VllmWorker", "m", "decode", "starting", "ns_VllmWorker_1"] == 1
    assert found["dynamo_process_state", "VllmWorker", "m", "decode", "ready", "ns_VllmWorker_1"] == 0
    assert found["dynamo_process_starts_total", "ns_Router"] == 1
    assert found["dynamo_router_assignments_total", "assigned", "kv"] == 5
    assert found["dynamo_router_assignments_total", "unassigned", "kv"] == 0
    assert found["dynamo_router_pull_tokens_total",] == 50
    assert found["dynamo_worker_recomputed_tokens_total", *worker] == 30
    assert found["dynamo_worker_preempted_tokens", *worker] == 10
    assert found["dynamo_router_tokens_total",] == 900
    assert found["dynamo_router_predicted_cached_tokens_total",] == 640
    assert found["dynamo_router_index_blocks",] == 77
    assert found["dynamo_router_workers_out_of_step",] == 0
    assert found["dynamo_prefill_queue_jobs", "m", "waiting"] == 3
    assert found["dynamo_prefills_total", "m", "long"] == 2
    assert found["dynamo_migrations_total", "m", "migrated", "drain"] == 3
    assert found["dynamo_migrations_pulled_tokens_total", "m"] == 96
    assert found["dynamo_migrations_pulled_bytes_total", "m"] == 4096
    assert found["dynamo_frontend_requests_in_flight", "m"] == 4
    assert found["dynamo_planner_workers", "decode", "starting"] == 1
    assert found["dynamo_planner_kv_usage_ratio", "decode"] == 0.75
    assert found["dynamo_planner_devices",] == 2
    assert found["dynamo_planner_changing",] == 1
    assert found["dynamo_planner_decisions_total", "yes"] == 1


def test_a_role_of_the_graph_without_a_worker_has_none_which_is_known() -> None:
    found = exposed(WHOLE)
    assert found["dynamo_workers", "m", "decode"] == 1
    assert found["dynamo_workers", "m", "prefill"] == 0
    assert ("dynamo_workers", "m", "aggregated") not in found


def test_a_worker_whose_lease_is_revoked_is_none_that_may_be_given_requests() -> None:
    assert exposed(snapshot(DECODE, routable=frozenset()))["dynamo_workers", "m", "decode"] == 0


def test_what_is_unknown_is_left_out() -> None:
    unmeasured = replace(DECODE, load=Load(running=0), counts=None, engine=None, started_at=None)
    names = {series[0] for series in exposed(snapshot(unmeasured), FrontendState(requests=0))}
    assert names == {
        "dynamo_worker_running_requests",
        "dynamo_process_state",
        "dynamo_process_starts_total",
        "dynamo_workers",
        "dynamo_frontend_requests_in_flight",
        "dynamo_frontend_cold_conversations_total",
    }


def test_histograms_stand_beside_the_rest() -> None:
    gaps = Histogram((0.1, 1.0))
    more = Histogram((0.1, 1.0))
    for gap_s in (0.05, 0.5):
        gaps.observe(gap_s)
    more.observe(7.0)
    registry = CollectorRegistry()
    expose(list, lambda: [Distribution(MIGRATION_GAP_SECONDS, ("m",), each) for each in (gaps, more)], registry)
    text = generate_latest(registry).decode()
    assert 'dynamo_migration_gap_seconds_bucket{le="1.0",model="m"} 2.0' in text
    assert 'dynamo_migration_gap_seconds_count{model="m"} 3.0' in text
    assert 'dynamo_migration_gap_seconds_sum{model="m"} 7.55' in text


def test_revisions_of_an_endpoint_are_added_up_and_its_workers_are_told_apart() -> None:
    old = replace(DECODE, watcher="ns_chat@1_W", lease="1")
    new = [replace(DECODE, watcher=f"ns_chat@2_W_{index}", lease=f"2{index}") for index in (1, 2)]
    leases = frozenset({"1", "21", "22"})
    found = series_of(
        [
            ModelState("", snapshot(ROUTER)),
            ModelState("chat", snapshot(old, routable=leases, queue=QueueLength(3, 1)), FRONTEND),
            ModelState("chat", snapshot(*new, routable=leases, queue=QueueLength(2, 0)), FRONTEND),
        ]
    )
    assert found["dynamo_workers", "chat", "decode"] == 3
    assert found["dynamo_frontend_requests_in_flight", "chat"] == 8
    assert found["dynamo_prefill_queue_jobs", "chat", "waiting"] == 5
    assert found["dynamo_migrations_total", "chat", "migrated", "drain"] == 6
    assert found["dynamo_worker_running_requests", "chat", "decode", "ns_chat@1_W"] == 3
    assert found["dynamo_worker_running_requests", "chat", "decode", "ns_chat@2_W_2"] == 3
    # A graph without a model of its own has none in flight, rather than zero.
    assert ("dynamo_frontend_requests_in_flight", "") not in found
    assert not [series for series in found if series[0] == "dynamo_workers" and series[1] != "chat"]


def test_endpoints_tell_their_state_and_the_numbers_of_their_workers() -> None:
    spec = EndpointSpec(name="chat", model="m", disaggregated=True)
    status = EndpointStatus("updating", wanted=3, ready=2, wanted_prefill=1)
    history = EndpointHistory({"idle": 2}, {"swap": 1}, {"request": 3}, swaps=1)
    chat = EndpointView(spec, status, created_at=1.0, updated_at=2.0, history=history)
    adapter = EndpointView(EndpointSpec(name="tuned", model="/a", adapter_of="chat"), EndpointStatus("ready"), 1.0, 2.0)
    found = series_of([], [chat, adapter])
    assert found["dynamo_endpoint_state", "chat", "updating"] == 1
    assert found["dynamo_endpoint_state", "chat", "ready"] == 0
    assert found["dynamo_endpoint_wanted_workers", "chat", "decode"] == 3
    assert found["dynamo_endpoint_ready_workers", "chat", "decode"] == 2
    assert found["dynamo_endpoint_wanted_workers", "chat", "prefill"] == 1
    assert found["dynamo_endpoint_ready_workers", "chat", "prefill"] == 0
    assert found["dynamo_endpoint_state", "tuned", "ready"] == 1
    assert found["dynamo_endpoint_wakes_total", "request", "chat"] == 3
    assert found["dynamo_endpoint_wakes_total", "schedule", "chat"] == 0
    assert found["dynamo_endpoint_sleeps_total", "swap", "chat"] == 1
    assert found["dynamo_endpoint_parks_total", "idle", "chat"] == 2
    assert found["dynamo_endpoint_swaps_total", "chat"] == 1
    assert not [series for series in found if "workers" in series[0] and series[1] == "tuned"]


def test_the_planner_tells_what_it_wants_for_endpoints() -> None:
    reports = (
        EndpointReport("chat", "decode", ordered=2, wanted=5, share=3),
        EndpointReport("base", "decode", ordered=1),
    )
    found = exposed(snapshot(planner=replace(REPORT, endpoints=reports)))
    numbers = {series[1:3]: value for series, value in found.items() if series[0] == "dynamo_planner_endpoint_workers"}
    assert numbers == {("chat", "ordered"): 2, ("chat", "wanted"): 5, ("chat", "share"): 3, ("base", "ordered"): 1}


def test_processes_without_an_engine_have_no_series_of_workers() -> None:
    assert not [series for series in exposed(snapshot(ROUTER)) if series[0].startswith("dynamo_worker_")]


@given(st.lists(presences, max_size=3, unique_by=lambda presence: presence.watcher), planner_reports)
def test_whatever_processes_say_can_be_shown(members: list[Presence], report: PlannerReport) -> None:
    registry = CollectorRegistry()
    expose(lambda: samples([ModelState("m", snapshot(*members, planner=report), FRONTEND)]), registry=registry)
    generate_latest(registry)


# Names that others rely on


def test_names_follow_prometheus_habits() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"dynamo_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name


def test_every_metric_is_in_the_documentation_as_it_is() -> None:
    text = (ROOT / "docs" / "guides" / "monitoring.md").read_text()
    for metric in METRICS:
        labels = ", ".join(metric.labels) or "-"
        assert f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |" in text
    documented = re.findall(r"^\| `(dynamo_\w+)`", text, re.MULTILINE)
    assert sorted(documented) == sorted(metric.name for metric in METRICS)


def test_the_dashboard_asks_for_nothing_of_ours_that_there_is_not() -> None:
    dashboard = json.loads((ROOT / "docs" / "dashboards" / "dynamo-local.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    asked = {name for expression in expressions for name in re.findall(r"\bdynamo_[a-z_]+", expression)}
    buckets = {f"{metric.name}_bucket" for metric in METRICS if metric.kind == "histogram"}
    assert asked <= {metric.name for metric in METRICS} | buckets
    of_models = {metric.name for metric in METRICS if metric.labels[:1] == ("model",) and "process" not in metric.name}
    chosen = re.compile(r"(dynamo_[a-z_]+?)(?:_bucket)?\{[^}]*model=~\"\$model\"")
    assert asked & of_models <= {name for expression in expressions for name in chosen.findall(expression)}
    # And shows most of what there is.
    assert len(asked) >= 18
