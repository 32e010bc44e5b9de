"""Generators of messages, for property tests."""

from __future__ import annotations

import math
from typing import Any, get_args

import msgspec
from hypothesis import strategies as st

from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.messages.admin import (
    AdminRequest,
    HoldQuestion,
    Holds,
    MigrationOrder,
    MigrationReport,
    MigrationResult,
    ParkAnswer,
    ParkQuestion,
    RequestRow,
    RequestsAnswer,
    RequestsQuestion,
    RoleAnswer,
    RoleQuestion,
)
from dynamo_local.core.messages.endpoints import (
    CreateEndpoint,
    DeleteEndpoint,
    EndpointOrder,
    EndpointRefusal,
    EndpointsAnswer,
    EndpointStatus,
    EndpointView,
    ListEndpoints,
    ParkEndpoint,
    ScaleEndpoint,
    UpdateEndpoint,
    WakeEndpoint,
)
from dynamo_local.core.messages.events import Event
from dynamo_local.core.messages.hot_prefixes import HotBlock, HotPrefixesAnswer, HotPrefixesQuestion, Origin
from dynamo_local.core.messages.keys import (
    CreateKey,
    KeyOrder,
    KeysAnswer,
    KeyView,
    ListKeys,
    RevokeKey,
    RotateKey,
)
from dynamo_local.core.messages.kv import (
    CachedAnswer,
    CachedQuestion,
    ConfirmAnswer,
    ConfirmQuestion,
    PinAnswer,
    PinQuestion,
    Unpin,
)
from dynamo_local.core.messages.kv_events import KvChanges, KvStateQuestion
from dynamo_local.core.messages.metrics import (
    Kind,
    MetricFamily,
    MetricSample,
    MetricsAnswer,
    MetricShare,
    MetricsQuestion,
)
from dynamo_local.core.messages.migration import CancelReservation, MigrationAnswer, MigrationRequest, Reserve, Warm
from dynamo_local.core.messages.planner import DecisionReport, EndpointReport, PlannerReport, RoleReport
from dynamo_local.core.messages.prefill import PrefillClaim, PrefillGrant, PrefillJob
from dynamo_local.core.messages.presence import (
    ClassUsage,
    Counts,
    EndedMigrations,
    EngineInfo,
    Exclusive,
    LeaseLost,
    LeaseRevoked,
    Load,
    MigrationCounts,
    Presence,
)
from dynamo_local.core.messages.rotation import AddressChanged, AddressTaken, RotateToken, RotationAnswer
from dynamo_local.core.messages.routes import RouteRow, RoutesAnswer, RoutesQuestion, WeighedWorker
from dynamo_local.core.messages.routing import Assignment, AssignRequest, Charge, Charged, Charges, Prefilled, Released
from dynamo_local.core.messages.tokens import Array, Logprobs, TokenBatch, TokenDelta
from dynamo_local.core.messages.work import (
    Ack,
    AskExclusive,
    Cancel,
    EndExclusive,
    Progress,
    RequestEpoch,
    Resend,
    Submit,
    Work,
)
from tests.unit.core.messages.places_strategies import PLACES_BY_KIND

text = st.text(max_size=12)
counts = st.integers(0, 2**31)
finite = st.floats(allow_nan=False, allow_infinity=False)
tokens = st.lists(st.integers(0, 2**31), max_size=6)
texts = st.lists(text, max_size=3).map(tuple)
packed = st.dictionaries(text, counts, max_size=3).map(lambda m: msgspec.Raw(msgspec.msgpack.encode(m)))
charges = st.builds(
    Charge, request_id=text, worker=text, tokens=counts, uncached=st.none() | counts, age_s=finite, order=counts
)
request_epochs = st.builds(RequestEpoch, request_id=text, epoch=counts)


@st.composite
def arrays(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> Array:
    dims = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)) if shape is None else shape
    dtype = draw(st.sampled_from(["int32", "int64", "float32"]))
    size = math.prod(dims) * (8 if dtype == "int64" else 4)
    return Array(dtype, tuple(dims), draw(st.binary(min_size=size, max_size=size)))  # type: ignore[arg-type]


@st.composite
def logprobs(draw: st.DrawFn, positions: int | None = None) -> Logprobs:
    n = draw(st.integers(0, 4)) if positions is None else positions
    k = draw(st.integers(1, 3))
    return Logprobs(draw(arrays((n, k))), draw(arrays((n, k))), draw(arrays((n,))))


deltas = st.builds(
    TokenDelta,
    request_id=text,
    epoch=counts,
    position=counts,
    token_ids=tokens,
    finish=st.sampled_from([None, "stop", "length", "abort", "error", "repetition"]),
    stop_reason=st.none() | st.integers(-(2**31), 2**31) | text,
    error=st.none() | text,
    refused=st.booleans(),
    failed=st.booleans(),
    fault=st.sampled_from([None, "request", "deaths"]),
    logprobs=st.none() | logprobs(),
    prompt_logprobs=st.none() | logprobs(),
    cached_tokens=st.none() | counts,
    created_tokens=counts,
    events=st.lists(st.tuples(st.integers(1, 3), finite), max_size=3).map(tuple),
    pooled=st.none() | arrays(),
)
engine_infos = st.builds(
    EngineInfo,
    engine=text,
    model=text,
    max_model_len=counts,
    block_size=counts,
    kv_blocks=counts,
    max_num_seqs=counts,
    tasks=texts,
    kv_events=st.booleans(),
    kv_network=text,
)
shares = st.none() | st.floats(0, 1)
loads = st.builds(
    Load,
    running=st.none() | counts,
    waiting=st.none() | counts,
    kv_usage=shares,
    kv_pinned=shares,
    preempted_tokens=st.none() | st.integers(0, 1 << 40),
    recomputed_tokens=st.none() | st.integers(0, 1 << 40),
    at=st.none() | finite,
    head_tokens=st.none() | counts,
    head_priority=st.none() | counts,
    head_since=st.none() | finite,
    age_s=st.none() | finite,
    head_age_s=st.none() | finite,
    by_class=st.none() | st.lists(st.builds(ClassUsage, text, counts, counts), max_size=3).map(tuple),
)
told_migrations = st.builds(
    MigrationCounts,
    ended=st.lists(st.builds(EndedMigrations, reason=text, outcome=text, number=counts), max_size=3).map(tuple),
    pulled_bytes=counts,
    gap_s=st.none() | st.floats(0, 1e3),
    gap_steps=st.none() | st.floats(0, 1e3),
)
told_counts = st.builds(
    Counts,
    **{
        **dict.fromkeys(Counts.__struct_fields__, st.none() | counts),
        "migrations": st.none() | told_migrations,
        "policy": st.none() | text,
    },
)
presences = st.builds(
    Presence,
    watcher=text,
    component=text,
    role=text,
    lease=text,
    pid=counts,
    state=st.sampled_from(["starting", "ready", "draining", "failed"]),
    detail=text,
    engine=st.none() | engine_infos,
    load=st.none() | loads,
    url=st.none() | text,
    counts=st.none() | told_counts,
    exclusive=st.none() | st.builds(Exclusive, request_id=text, frontend=text, free=st.booleans()),
    started_at=st.none() | finite,
    machine=text,
    up_s=st.none() | finite,
)
submits = st.builds(
    Submit,
    request_id=text,
    epoch=counts,
    frontend=text,
    token_ids=tokens,
    sampling=packed,
    position=counts,
    arrival_time=finite,
    priority=st.integers(-(2**31), 2**31),
    cache_salt=st.none() | text,
    adapter=st.none() | text,
    reasoning_ended=st.none() | st.booleans(),
    reasoning_parser_kwargs=st.none() | st.binary(max_size=8),
    session_id=st.none() | text,
    trace_headers=st.none() | st.dictionaries(text, text, max_size=2),
    source=st.none() | text,
    hold_s=st.floats(0, 1e9),
    exclusive=st.booleans(),
    pools=st.booleans(),
)
progress = st.lists(st.builds(Progress, request_id=text, epoch=counts, position=counts), max_size=4).map(tuple)
acks = st.builds(Ack, progress=progress)
resends = st.builds(Resend, frontend=text, progress=progress)
cancels = st.builds(Cancel, requests=st.lists(request_epochs, max_size=4).map(tuple))
unpins = st.builds(Unpin, pins=texts)
exclusive_words = st.builds(AskExclusive, request_id=text, frontend=text) | st.builds(
    EndExclusive, request_id=text, frontend=text
)
role_reports = st.builds(
    RoleReport,
    role=text,
    routable=counts,
    starting=counts,
    retiring=counts,
    running=st.none() | counts,
    waiting=st.none() | counts,
    usage=shares,
)
endpoint_reports = st.builds(
    EndpointReport,
    endpoint=text,
    role=text,
    ordered=counts,
    **dict.fromkeys(("ready", "in_flight", "wanted", "share"), st.none() | counts),
    parked=counts,
    state=text,
)
planner_reports = st.builds(
    PlannerReport,
    watcher=text,
    policy=text,
    acts=st.booleans(),
    roles=st.lists(role_reports, max_size=3).map(tuple),
    devices=st.none() | counts,
    max_devices=counts,
    queue_waiting=st.none() | counts,
    queue_in_hand=st.none() | counts,
    changing=st.none() | text,
    decisions=st.lists(
        st.builds(DecisionReport, time=finite, text=text, outcomes=texts, times=counts, since=st.none() | finite),
        max_size=3,
    ).map(tuple),
    endpoints=st.lists(endpoint_reports, max_size=3).map(tuple),
)
reserves = st.builds(Reserve, request_id=text, tokens=counts, keep_s=finite, floor=st.none() | finite)
warms = st.builds(
    Warm,
    request_id=text,
    source=text,
    token_ids=tokens,
    within_s=finite,
    cache_salt=st.none() | text,
    adapter=st.none() | text,
    priority=st.integers(-(2**31), 2**31),
)
request_rows = st.builds(
    RequestRow,
    request_id=text,
    epoch=counts,
    worker=st.none() | text,
    prompt_tokens=counts,
    tokens=counts,
    age_s=finite,
    destination=st.none() | text,
    stays=st.none() | text,
    epoch_age_s=st.none() | finite,
    epoch_start=counts,
    migrations=counts,
    prefill=st.none() | text,
    fidelity=text,
    fidelity_because_of=st.none() | text,
)
move_results = st.builds(
    MigrationResult,
    request_id=text,
    outcome=text,
    why=text,
    destination=st.none() | text,
    warm_s=st.none() | finite,
    gap_s=st.none() | finite,
    gap_steps=st.none() | finite,
)
fields = st.dictionaries(text, st.none() | st.booleans() | counts | finite | text | texts.map(list), max_size=3)
endpoint_specs = st.builds(
    EndpointSpec,
    name=text,
    model=text,
    adapter_of=st.none() | text,
    engine=st.sampled_from(["vllm", "mocker"]),
    args=fields,
    gpu=st.none() | finite,
    min_workers=counts,
    max_workers=st.none() | counts,
    disaggregated=st.booleans(),
    min_prefill_workers=counts,
    max_prefill_workers=st.none() | counts,
    requests_per_worker=finite,
    policy=st.sampled_from(["concurrency", "load", "freeness"]),
    labels=st.dictionaries(text, text, max_size=3),
)
endpoint_statuses = st.builds(
    EndpointStatus,
    state=st.sampled_from(["waiting", "fetching", "starting", "ready", "updating", "failed", "deleting"]),
    reason=text,
    revision=counts,
    wanted=counts,
    ready=counts,
    starting=counts,
    wanted_prefill=counts,
    ready_prefill=counts,
)
endpoint_views = st.builds(
    EndpointView,
    spec=endpoint_specs,
    status=endpoint_statuses,
    created_at=finite,
    updated_at=finite,
    served_names=texts,
)
endpoint_orders = (
    st.builds(ListEndpoints, name=st.none() | text)
    | st.builds(CreateEndpoint, spec=fields, by=text)
    | st.builds(UpdateEndpoint, name=text, changes=fields)
    | st.builds(DeleteEndpoint, name=text)
    | st.builds(ParkEndpoint, name=text)
    | st.builds(WakeEndpoint, name=text, asked=st.booleans())
    | st.builds(ScaleEndpoint, name=text, workers=st.none() | counts, prefill_workers=st.none() | counts)
)

key_orders = (
    st.builds(ListKeys, name=st.none() | text, by=text)
    | st.builds(CreateKey, fields=fields, by=text)
    | st.builds(RotateKey, name=text, overlap_s=st.none() | finite, by=text)
    | st.builds(RevokeKey, name=text, opens=st.booleans(), by=text)
)
key_views = st.builds(
    KeyView, name=text, created_at=finite, endpoints=texts, requests_per_minute=st.none() | counts, admin=st.booleans()
)

weighed_workers = st.builds(
    WeighedWorker,
    worker=text,
    cost=finite,
    cached=counts,
    uncached=counts,
    queued=counts,
    requests=counts,
    failed=st.booleans(),
)
route_rows = st.builds(
    RouteRow,
    request_id=text,
    revision=text,
    frontend=text,
    tokens=counts,
    age_s=finite,
    worker=st.none() | text,
    cached=st.none() | counts,
    pull_from=st.none() | text,
    candidates=st.lists(weighed_workers, max_size=2).map(tuple),
    left_out=counts,
)

families = st.builds(
    MetricFamily,
    name=text,
    kind=st.sampled_from(get_args(Kind)),
    help=text,
    samples=st.lists(
        st.builds(
            MetricSample,
            name=text,
            labels=st.lists(st.tuples(text, text), max_size=2).map(tuple),
            value=st.floats(allow_nan=False),
        ),
        max_size=2,
    ).map(tuple),
)
metric_shares = st.builds(MetricShare, families=st.lists(families, max_size=2).map(tuple))
BY_KIND: dict[Any, st.SearchStrategy[Any]] = {
    RotateToken: st.builds(RotateToken, order=text),
    RotationAnswer: st.builds(
        RotationAnswer, finished=st.booleans(), processes=counts, disconnected=texts, refused=text, remedy=text
    ),
    AddressChanged: st.builds(AddressChanged),
    AddressTaken: st.builds(AddressTaken, lease=text, user=st.none() | text),
    Presence: presences,
    LeaseLost: st.builds(LeaseLost, lease=text),
    LeaseRevoked: st.builds(LeaseRevoked, lease=text),
    AssignRequest: st.builds(
        AssignRequest,
        request_id=text,
        frontend=text,
        tokens=counts,
        avoid=texts,
        blocks=st.binary(max_size=16),
        block_tokens=counts,
    ),
    Assignment: st.builds(Assignment, worker=st.none() | text, cached=st.none() | counts, pull_from=st.none() | text),
    Charged: st.builds(Charged, frontend=text, charge=charges, blocks=st.binary(max_size=16)),
    MetricsQuestion: st.builds(MetricsQuestion),
    MetricsAnswer: st.builds(MetricsAnswer, own=metric_shares, ended=st.dictionaries(text, metric_shares, max_size=2)),
    Charges: st.builds(Charges, frontend=text, charges=st.lists(charges, max_size=3).map(tuple)),
    Released: st.builds(Released, request_id=text, frontend=text),
    Prefilled: st.builds(Prefilled, request_id=text, frontend=text),
    HotPrefixesQuestion: st.builds(HotPrefixesQuestion, counts),
    HotPrefixesAnswer: st.builds(
        HotPrefixesAnswer,
        block_tokens=counts,
        origins=st.lists(st.builds(Origin, st.none() | text, st.none() | text)).map(tuple),
        blocks=st.lists(
            st.builds(HotBlock, st.integers(-100, 100), st.binary(max_size=64), st.floats(0, 1e9, allow_nan=False))
        ).map(tuple),
    ),
    KvChanges: st.builds(
        KvChanges,
        worker=text,
        number=counts,
        removed=st.binary(max_size=16),
        stored=st.binary(max_size=16),
        cleared=st.booleans(),
        part=counts,
        parts=counts,
    ),
    KvStateQuestion: st.builds(KvStateQuestion),
    RoutesQuestion: st.builds(RoutesQuestion, limit=counts, revisions=st.none() | texts),
    RoutesAnswer: st.builds(RoutesAnswer, policy=text, routes=st.lists(route_rows, max_size=2).map(tuple)),
    Work: submits | cancels | acks | resends | unpins | exclusive_words,
    TokenBatch: st.builds(
        TokenBatch,
        worker=text,
        seq=counts,
        deltas=st.lists(deltas, max_size=3).map(tuple),
    ),
    CachedQuestion: st.builds(CachedQuestion, token_ids=tokens, cache_salt=st.none() | text, adapter=st.none() | text),
    CachedAnswer: st.builds(CachedAnswer, tokens=counts),
    PrefillJob: st.builds(PrefillJob, job=text, request_id=text, frontend=text, tokens=counts, valid_s=finite),
    PrefillClaim: st.builds(PrefillClaim, job=text, request_id=text, worker=text, delivery=counts),
    PrefillGrant: st.builds(PrefillGrant, work=st.none() | submits),
    PinQuestion: st.builds(
        PinQuestion,
        pin=text,
        fingerprint=text,
        hashes=st.lists(st.binary(max_size=32), max_size=3).map(tuple),
        keep_s=finite,
        rest=tokens.map(tuple),
        machine=text,
        network=text,
    ),
    PinAnswer: st.builds(
        PinAnswer,
        blocks=counts,
        until=finite,
        handle=packed,
        refused=st.none() | text,
        rest=counts,
        machine=text,
        pin=text,
    ),
    ConfirmQuestion: st.builds(ConfirmQuestion, pin=text),
    ConfirmAnswer: st.builds(ConfirmAnswer, held=st.booleans()),
    RoleQuestion: st.builds(RoleQuestion, role=text),
    HoldQuestion: st.builds(HoldQuestion),
    Holds: st.builds(Holds, refused=st.dictionaries(st.integers(0, 1024), text, max_size=3)),
    ParkQuestion: st.builds(ParkQuestion, parked=st.booleans()),
    ParkAnswer: st.builds(ParkAnswer, parked=st.booleans(), refused=st.none() | text),
    RoleAnswer: st.builds(RoleAnswer, role=text, refused=st.none() | text),
    PlannerReport: planner_reports,
    Event: st.builds(
        Event,
        kind=text,
        what=text,
        why=text,
        watcher=text,
        time=finite,
        pid=st.none() | counts,
        exit_code=st.none() | st.integers(-64, 255),
        devices=st.lists(counts, max_size=3).map(tuple),
        request=st.none() | text,
        outcome=st.none() | text,
        source=st.none() | text,
        destination=st.none() | text,
        gap_s=st.none() | finite,
    ),
    MigrationRequest: reserves | warms | st.builds(CancelReservation, request_id=text),
    MigrationAnswer: st.builds(
        MigrationAnswer, refused=st.none() | text, pulled_tokens=counts, pulled_bytes=st.none() | counts
    ),
    AdminRequest: st.builds(RequestsQuestion, limit=counts)
    | st.builds(
        MigrationOrder,
        request_ids=texts,
        source=st.none() | text,
        destination=st.none() | text,
        cold=st.booleans(),
    ),
    RequestsAnswer: st.builds(RequestsAnswer, requests=st.lists(request_rows, max_size=3).map(tuple), left_out=counts),
    MigrationReport: st.builds(MigrationReport, results=st.lists(move_results, max_size=3).map(tuple)),
    EndpointOrder: endpoint_orders,
    KeyOrder: key_orders,
    KeysAnswer: st.builds(KeysAnswer, keys=st.lists(key_views, max_size=2).map(tuple), secret=st.none() | text),
    EndpointsAnswer: st.builds(
        EndpointsAnswer,
        endpoints=st.lists(endpoint_views, max_size=2).map(tuple),
        refused=st.none() | st.builds(EndpointRefusal, status=counts, cause=text, remedy=text),
    ),
    **PLACES_BY_KIND,
}
"""Every message that travels by itself, as its receiver decodes it."""

any_message = st.sampled_from(list(BY_KIND)).flatmap(lambda kind: st.tuples(st.just(kind), BY_KIND[kind]))
