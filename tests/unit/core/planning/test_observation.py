"""Observations and windows from statefile, presences and queue: nothing unknown becomes a number."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest

from dynamo_local.core.fleet.rates import STALE_S, Reading, reading_of
from dynamo_local.core.messages.presence import Counts, EngineInfo, Load, Presence, ProcessState
from dynamo_local.core.messages.work import QueueLength
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.window import (
    KEPT_WINDOWS,
    Claim,
    Fleet,
    WorkerSeen,
    aggregate,
    observe,
    remember,
)
from tests.unit.core.planning.fleets import DISAGGREGATED, KV_TOKENS, prefiller, pull, worker

NOW = 1000.0
FULL = Load(3, 1, 0.5, 0.2, at=NOW - 1)


def presence(name: str = "VllmWorker", state: ProcessState = "ready", role: str = "decode") -> Presence:
    info = EngineInfo("mocker", "m", 8192, 32, 1024, 64)
    return Presence(f"ns_{name}", "VllmWorker", role, f"lease of {name}", 1, state, engine=info, load=FULL)


def seen(claim: Claim, *heard: Presence, routable: tuple[Presence, ...] = ()) -> WorkerSeen:
    found = observe(NOW, [claim], heard, routable, None, DISAGGREGATED).workers
    assert found is not None
    return found[0]


def test_a_worker_is_what_statefile_and_presence_say() -> None:
    one = presence()
    found = seen(Claim("ns_VllmWorker", "decode", 2), one, routable=(one,))
    assert found == WorkerSeen("ns_VllmWorker", "decode", "routable", 2, Reading(3, 1, 0.5, 1.0), KV_TOKENS)


def test_who_is_not_heard_starts_and_who_is_not_routable_leaves() -> None:
    claim = Claim("ns_VllmWorker", "decode", 1)
    assert seen(claim).standing == "starting"
    assert seen(claim, presence(state="starting")).standing == "starting"
    assert seen(claim, presence(state="draining")).standing == "retiring"
    assert seen(claim, presence(state="parked")).standing == "parked"
    # Its lease is revoked: it says that it is ready, and may be given nothing.
    assert seen(claim, presence()).standing == "retiring"
    one = presence()
    assert seen(Claim("ns_VllmWorker", "decode", 1, retiring=True), one, routable=(one,)).standing == "retiring"


def test_a_process_is_ahead_of_the_statefile_about_its_role() -> None:
    one = presence(role="prefill")
    assert seen(Claim("ns_VllmWorker", "decode", 1), one, routable=(one,)).role == "prefill"


def test_processes_without_a_claim_are_not_counted() -> None:
    assert observe(NOW, [], [presence()], [presence()], None, DISAGGREGATED).workers == ()


def test_without_statefile_or_bus_nothing_is_known() -> None:
    found = observe(NOW, None, [presence()], [presence()], None, DISAGGREGATED)
    assert (found.workers, found.devices) == (None, None)


@pytest.mark.parametrize(
    "load",
    [
        None,
        Load(),
        Load(None, 0, 0.5, at=NOW),
        Load(1, None, 0.5, at=NOW),
        Load(1, 0, None, at=NOW),
        Load(1, 0, 0.5),
        Load(1, 0, 0.5, at=NOW - STALE_S - 0.1),
        Load(1, 0, math.nan, at=NOW),
        Load(1, 0, 0.5, at=math.nan),
    ],
)
def test_what_was_not_measured_or_long_ago_is_no_reading(load: Load | None) -> None:
    assert reading_of(load, NOW) is None


def test_pinned_blocks_are_not_usage() -> None:
    reading = reading_of(Load(0, 0, 0.1, 0.8, at=NOW), NOW)
    assert reading is not None
    assert reading.kv_usage == 0.1


def test_a_worker_says_how_long_it_was_at_work() -> None:
    busy = msgspec.structs.replace(presence(), counts=Counts(prefill_s=2.5))
    found = seen(Claim("ns_VllmWorker", "decode", 1), busy, routable=(busy,)).reading
    assert found is not None
    assert found.prefill_s == 2.5


def test_what_the_head_of_a_queue_needs_is_unknown_unless_it_is_told_or_nothing_waits() -> None:
    for load, known in (
        (Load(1, 0, 0.1, at=NOW), 0),
        (Load(1, 2, 0.1, at=NOW), None),
        (Load(1, 2, 0.1, at=NOW, head_tokens=70), 70),
    ):
        reading = reading_of(load, NOW)
        assert reading is not None
        assert reading.head_tokens == known


# Windows


def test_a_worker_that_stopped_telling_is_unknown_whatever_it_said_before() -> None:
    window = aggregate([pull(worker(kv=0.9), prefiller()), pull(worker(kv=None), prefiller(), at=1.0)])
    decode = window.role("decode")
    assert decode is not None
    assert decode.pressure is None
    assert [one.watcher for one in decode.unread] == ["ns_VllmWorker"]


def test_means_are_of_the_readings_there_are() -> None:
    pulls = [pull(worker(kv=kv), prefiller(), at=float(at)) for at, kv in enumerate((0.2, None, 0.6))]
    decode = aggregate(pulls).role("decode")
    assert decode is not None
    assert decode.kv_usage == pytest.approx(0.4)


def prefilling(*told: tuple[float, float | None]) -> float | None:
    """Return how busy a prefill worker was, from pairs of a pull's time and its reported time of work. No reading shows
    the worker at work."""
    pulls = [
        pull(replace(prefiller(), reading=Reading(0, 0, 0.0, 0.0, prefill_s=prefill_s)), at=at)
        for at, prefill_s in told
    ]
    prefill = aggregate(pulls).role("prefill")
    assert prefill is not None
    return prefill.busy


def test_a_prefill_worker_is_busy_for_as_long_as_it_says_whenever_it_was_looked_at() -> None:
    assert prefilling((0.0, 7.0), (1.0, 7.2), (4.0, 10.0)) == pytest.approx(0.75)
    assert prefilling((0.0, 7.0), (4.0, 7.0)) == 0.0
    assert prefilling((0.0, 7.0), (4.0, 11.5)) == 1.0


@pytest.mark.parametrize("told", [((0.0, None), (4.0, 3.0)), ((0.0, 9.0), (4.0, 1.0)), ((0.0, 9.0), (0.0, 9.0))])
def test_without_two_times_of_the_same_process_it_counts_how_often_it_was_seen_at_work(
    told: tuple[tuple[float, float | None], ...],
) -> None:
    assert prefilling(*told) == 0.0


def test_who_left_during_the_interval_does_not_count() -> None:
    pulls = [pull(worker(kv=0.9), worker("VllmWorker_1", kv=0.1)), pull(worker(kv=0.9), at=1.0)]
    decode = aggregate(pulls).role("decode")
    assert decode is not None
    assert decode.kv_usage == pytest.approx(0.9)


def test_a_queue_that_could_not_be_read_at_last_is_unknown() -> None:
    assert aggregate([pull(queue=3), pull(queue=None, at=1.0)]).queue is None
    known = aggregate([pull(queue=None), pull(queue=QueueLength(2, 1), at=1.0), pull(queue=4, at=2.0)]).queue
    assert known is not None
    assert (known.first, known.last, known.mean, known.in_flight) == (2, 4, 3.0, 3.5)


def test_roles_without_workers_are_there() -> None:
    window = aggregate([pull()])
    assert window.roles is not None
    assert {name: role.workers for name, role in window.roles.items()} == {"decode": (), "prefill": ()}


def test_a_history_keeps_what_policies_look_at_and_no_more() -> None:
    options = PlannerOptions(adjustment_interval=1.0, concurrency_window=20.0)
    history: tuple[object, ...] = ()
    for at in range(100):
        window = aggregate([Fleet(float(at), (), None, DISAGGREGATED)])
        history = remember(history, window, options)  # type: ignore[arg-type]
    assert len(history) == 21
    assert len(remember((), window, PlannerOptions(concurrency_window=0.0))) == 1
    assert KEPT_WINDOWS >= 4
