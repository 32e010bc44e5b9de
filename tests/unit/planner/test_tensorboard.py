"""The planner's event files, read back with TensorBoard's own reader."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

from dynamo_local.core.errors import ConfigError
from dynamo_local.core.fleet.rates import Reading
from dynamo_local.core.fleet.view import routing_of
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.messages.work import QueueLength
from dynamo_local.core.migration.protocol import migrations_of
from dynamo_local.core.planning.actions import ActionOutcome, AddWorker
from dynamo_local.core.planning.decide import decide
from dynamo_local.core.planning.decision import Decision, Verdict
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.window import Fleet, Observation, WorkerSeen, main_of, recomputed_of
from dynamo_local.planner.tensorboard import (
    ACTING_DECISIONS,
    ALL_DECISIONS,
    CHANGES,
    EventFolder,
    TensorBoardRecorder,
    of_observation,
)
from tests.unit.core.planning import endpoint_fleets
from tests.unit.monitor.graph import DECODE, FRONTEND, ROUTER

BUSY = WorkerSeen("ns_VllmWorker", "decode", "routable", 1, Reading(8, 4, 0.9, 0.1), 1000)
CALM = WorkerSeen("ns_VllmWorker_1", "decode", "routable", 1, Reading(1, 0, 0.5, 0.1), 1000)
UNREAD = WorkerSeen("ns_VllmWorker_2", "decode", "starting", 1)
PREFILLS = WorkerSeen("ns_PrefillWorker", "prefill", "routable", 1, Reading(0, 0, 0.0, 0.1), 1000)
FLEET = Fleet(
    at=100.0,
    workers=(BUSY, CALM, UNREAD, PREFILLS, replace(PREFILLS, watcher="ns_PrefillWorker_1")),
    queue=QueueLength(6, 2),
    templates={"decode": "VllmWorker", "prefill": "PrefillWorker"},
)


def pulled(fleet: Fleet = FLEET, held: float | None = 5, inventory: int | None = 8) -> Observation:
    return Observation(fleet.at, (main_of(fleet),), held, inventory)


ADD = AddWorker("decode")
DECISION = Decision(
    at=130.0,
    policy="load",
    verdicts=(Verdict("decode", 1, "mean KV 0.93 > 0.9", {"mean kv": 0.93, "trend": None}),),
    actions=(ADD,),
    devices=5,
    max_devices=8,
)
WALL = 1_800_000_000.0


@pytest.fixture
def recorder(tmp_path: Path) -> TensorBoardRecorder:
    return TensorBoardRecorder(tmp_path, clock=lambda: 130.0, wall_clock=lambda: WALL)


def read_back(recorder: TensorBoardRecorder) -> EventAccumulator:
    recorder.close()
    events = EventAccumulator(str(recorder.folder), size_guidance={TENSORS: 0})
    events.Reload()
    return events


def scalars(events: EventAccumulator) -> dict[str, float]:
    """Return the last value of each series."""
    return {tag: round(events.Scalars(tag)[-1].value, 4) for tag in events.Tags()["scalars"]}


def test_every_number_of_a_pull_is_a_scalar(recorder: TensorBoardRecorder) -> None:
    recorder.observed(pulled(), ())
    assert scalars(read_back(recorder)) == {
        "queue/waiting": 6,
        "queue/in_hand": 2,
        "queue/waiting_per_prefill_worker": 3,
        "devices/inventory": 8,
        "devices/held": 5,
        "workers/decode_routable": 2,
        "workers/decode_starting": 1,
        "workers/decode_parked": 0,
        "workers/decode_retiring": 0,
        "workers/prefill_routable": 2,
        "workers/prefill_starting": 0,
        "workers/prefill_parked": 0,
        "workers/prefill_retiring": 0,
        "kv_usage/mean_decode": 0.7,
        "running/all_decode": 9,
        "waiting/all_decode": 4,
        "kv_usage/mean_prefill": 0,
        "running/all_prefill": 0,
        "waiting/all_prefill": 0,
        "kv_usage/ns_VllmWorker": 0.9,
        "running/ns_VllmWorker": 8,
        "waiting/ns_VllmWorker": 4,
        "kv_usage/ns_VllmWorker_1": 0.5,
        "running/ns_VllmWorker_1": 1,
        "waiting/ns_VllmWorker_1": 0,
        "kv_usage/ns_PrefillWorker": 0,
        "running/ns_PrefillWorker": 0,
        "waiting/ns_PrefillWorker": 0,
        "kv_usage/ns_PrefillWorker_1": 0,
        "running/ns_PrefillWorker_1": 0,
        "waiting/ns_PrefillWorker_1": 0,
    }


def test_what_could_not_be_read_has_no_scalar(recorder: TensorBoardRecorder) -> None:
    recorder.observed(pulled(replace(FLEET, workers=None, queue=None), None, None), ())
    assert read_back(recorder).Tags()["scalars"] == []


def test_without_a_prefill_worker_the_queue_has_no_share(recorder: TensorBoardRecorder) -> None:
    recorder.observed(pulled(replace(FLEET, workers=(BUSY,))), ())
    found = scalars(read_back(recorder))
    assert found["queue/waiting"] == 6
    assert "queue/waiting_per_prefill_worker" not in found


def test_a_decision_is_text_with_its_numbers_its_reason_and_what_became_of_it(recorder: TensorBoardRecorder) -> None:
    recorder.observed(pulled(), ())
    recorder.decided(DECISION, [ActionOutcome(ADD, False, None, "it was not ready in time", 300.0)])
    events = read_back(recorder)
    (event,) = events.Tensors(ALL_DECISIONS)
    text = event.tensor_proto.string_val[0].decode()
    for part in (
        "**add a decode worker** (policy load, devices 5 of 8)",
        "not done in 300.0 s: it was not ready in time",
        "decode: one more: mean KV 0.93 > 0.9",
        "mean kv: 0.93",
        "trend: unknown",
    ):
        assert part in text
    assert event.step == 30
    assert event.wall_time == WALL
    assert events.Tensors(ACTING_DECISIONS)[0].tensor_proto == event.tensor_proto
    found = scalars(events)
    assert found["decision/decode_wanted"] == 1
    assert found["decision/decode_mean_kv"] == 0.93
    assert found["devices/budget"] == 8
    assert "decision/decode_trend" not in found


def test_decisions_that_change_nothing_are_told_apart(recorder: TensorBoardRecorder) -> None:
    recorder.decided(replace(DECISION, actions=()), [])
    assert read_back(recorder).Tags()["tensors"] == [ALL_DECISIONS]


def test_steps_are_seconds_of_the_planners_life_at_the_time_of_the_reading(recorder: TensorBoardRecorder) -> None:
    for waiting, at in enumerate((100.0, 101.5, 129.0)):
        recorder.observed(pulled(replace(FLEET, queue=QueueLength(waiting, 0), at=at)), ())
    found = read_back(recorder).Scalars("queue/waiting")
    assert [(event.step, event.wall_time) for event in found] == [(0, WALL - 30), (1, WALL - 28.5), (29, WALL - 1)]


def test_of_numbers_that_stay_hardly_anything_is_written(tmp_path: Path) -> None:
    """An hour of an idle server, pulled every second."""
    recorder = TensorBoardRecorder(tmp_path, clock=lambda: 3700.0, wall_clock=lambda: WALL)
    for second in range(3600):
        recorder.observed(pulled(replace(FLEET, at=100.0 + second)), ())
    found = read_back(recorder).Scalars("queue/waiting")
    assert [event.step for event in (found[0], found[-1])] == [0, 3599]
    assert sum(file.stat().st_size for file in recorder.folder.iterdir()) < 200_000


def test_lives_of_planners_are_separate_runs(tmp_path: Path) -> None:
    folders = []
    for wall in (WALL, WALL + 1):
        recorder = TensorBoardRecorder(tmp_path, clock=lambda: 0.0, wall_clock=lambda wall=wall: wall)  # type: ignore[misc]
        recorder.close()
        folders.append(recorder.folder)
    assert len(set(folders)) == 2
    assert all(folder.parent == tmp_path for folder in folders)


def test_a_folder_that_cannot_be_written_to_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write event files to"):
        TensorBoardRecorder(tmp_path / "file")


def test_a_full_disk_ends_the_recording_and_nothing_else(
    recorder: TensorBoardRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def add(_folder: EventFolder, _event: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(EventFolder, "add", add)
    recorder.observed(pulled(), ())
    recorder.observed(pulled(), ())
    recorder.close()
    assert caplog.text.count("No space left on device") == 1


def test_the_names_of_dynamo_are_written_beside_ours_if_asked_for(tmp_path: Path) -> None:
    recorder = TensorBoardRecorder(tmp_path, dynamo_tags=True, clock=lambda: 130.0, wall_clock=lambda: WALL)
    recorder.observed(pulled(), ())
    found = scalars(read_back(recorder))
    assert found["queue/waiting"] == 6
    assert {tag: value for tag, value in found.items() if "/" not in tag} == {
        "prefill_queue_size": 6,
        "average_kv_load": 0.74,
        "total_queued_requests": 4,
        "num_prefill_workers": 2,
        "num_decode_workers": 2,
        "num_gpu": 4,
    }


def scalars_of(recorder: TensorBoardRecorder, in_flight: int | None) -> dict[str, float]:
    """Record a pull with endpoint `chat`, and return the last value of each series."""
    observation = endpoint_fleets.pull(endpoint_fleets.seen(endpoint_fleets.spec(), in_flight=in_flight))
    recorder.observed(observation, decide(observation, {}, PlannerOptions()).decisions)
    return scalars(read_back(recorder))


def test_each_endpoint_has_curves(recorder: TensorBoardRecorder) -> None:
    assert scalars_of(recorder, in_flight=100) == {
        "endpoint_chat/in_flight": 100, "endpoint_chat/ready": 1, "endpoint_chat/ordered": 1,
        "endpoint_chat/wanted": 7, "endpoint_chat/share": 7, "endpoint_chat/parked": 0, "endpoint_chat/asleep": 0,
        "endpoint_chat/parks": 0, "endpoint_chat/wakes": 0, "endpoint_chat/swaps": 0,
    }  # fmt: skip


def test_what_is_unknown_of_an_endpoint_has_no_point(recorder: TensorBoardRecorder) -> None:
    assert "endpoint_chat/in_flight" not in scalars_of(recorder, in_flight=None)


def test_what_the_server_does_by_itself_is_text(recorder: TensorBoardRecorder) -> None:
    recorder.changed(Event("park", "parked", "no request for 60 s", endpoint="chat", cause="idle"))
    (text,) = read_back(recorder).Tensors(CHANGES)
    assert text.tensor_proto.string_val == [b"**chat** parked: no request for 60 s"]


def numbers(*members: Presence) -> dict[str, float]:
    main = main_of(Fleet(1.0, (), None, {}))
    counted = Observation(1.0, (main,), 0, None, 0, migrations_of(members), routing_of(members), recomputed_of(members))
    return of_observation(counted, ())


def test_migrations_are_told_by_reason_and_outcome_with_their_bytes_and_the_last_gap() -> None:
    found = numbers(FRONTEND, ROUTER)
    assert {name: value for name, value in found.items() if name.startswith("migrations/")} == {
        "migrations/drain_migrated": 3,
        "migrations/hand_migrated": 2,
        "migrations/hand_stayed": 1,
        "migrations/pulled_mib": 3,
        "migrations/last_gap_ms": 18.4,
        "migrations/last_gap_steps": 1.93,
    }


def test_without_migrations_there_are_no_such_series() -> None:
    assert not any(name.startswith("migrations/") for name in numbers(ROUTER))


def test_routing_and_what_is_computed_again_are_told() -> None:
    found = numbers(ROUTER, DECODE)
    assert {name: value for name, value in found.items() if name.startswith("routing/")} == {
        "routing/assigned": 5,
        "routing/unassigned": 0,
        "routing/tokens": 900,
        "routing/predicted_cached_tokens": 640,
        "routing/predicted_cached_share": 640 / 900,
        "routing/pull_tokens": 50,
        "routing/recomputed_tokens": 30,
    }
