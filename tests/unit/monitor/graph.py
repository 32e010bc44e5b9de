"""A graph as it may be at a moment, for tests of what is shown of it."""

from __future__ import annotations

from collections import Counter

from dynamo_local.core.messages.presence import Counts, EndedMigrations, EngineInfo, Load, MigrationCounts, Presence
from dynamo_local.core.messages.reports import DecisionReport, PlannerReport, RoleReport
from dynamo_local.core.messages.work import QueueLength
from dynamo_local.monitor.metrics import Snapshot

NOW = 1000.0
LOAD = Load(running=3, waiting=1, kv_usage=0.75, kv_pinned=0.0, preempted_tokens=10, recomputed_tokens=30)
COUNTS = Counts(requests=7, prompt_tokens=900, output_tokens=120, prefill_s=2.5)

DECODE = Presence(
    watcher="ns_VllmWorker",
    component="VllmWorker",
    role="decode",
    lease="d",
    pid=1,
    state="ready",
    engine=EngineInfo("mocker", "m", 8192, 32, 1024, 64),
    load=LOAD,
    counts=COUNTS,
    started_at=NOW - 125.0,
    revision="main@1",
)
STARTING = Presence(
    "ns_VllmWorker_1", "VllmWorker", "decode", "s", 2, "starting", "loading the model", revision="main@1"
)
ROUTED = Counts(
    assigned=5,
    unassigned=0,
    routed_tokens=900,
    predicted_tokens=640,
    pull_tokens=50,
    policy="kv",
    index_blocks=77,
    out_of_step=0,
)
ROUTER = Presence("ns_Router", "Router", "router", "r", 3, "ready", counts=ROUTED, started_at=NOW - 9.0)
MOVES = MigrationCounts(
    (
        EndedMigrations("drain", "migrated", 3),
        EndedMigrations("hand", "migrated", 2),
        EndedMigrations("hand", "stayed", 1),
    ),
    3 << 20,
    0.0184,
    1.93,
)
FRONTEND = Presence("ns_Frontend", "Frontend", "frontend", "f", 4, "ready", counts=Counts(migrations=MOVES))
REPORT = PlannerReport(
    watcher="ns_Planner",
    policy="load",
    acts=True,
    roles=(RoleReport("decode", routable=1, starting=1, usage=0.75), RoleReport("prefill", routable=0)),
    devices=2,
    max_devices=8,
    changing="add a decode worker",
    decisions=(DecisionReport(time=1.8e9, text="add a decode worker (decode: mean KV 0.93 > 0.9)"),),
)


def snapshot(
    *members: Presence,
    routable: frozenset[str] = frozenset({"d", "r"}),
    queue: QueueLength | None = None,
    planner: PlannerReport | None = None,
) -> Snapshot:
    return Snapshot(
        at=NOW,
        members=members,
        routable=routable,
        starts=Counter(member.watcher for member in members),
        queue=queue,
        planner=planner,
        decisions=Counter({True: 1} if planner else {}),
    )
