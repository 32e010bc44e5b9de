"""Events that are derived from presences and from the statefile."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from dynamo_local.core.errors import SupervisorError
from dynamo_local.core.fleet.view import Change, Happened
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.reports import Event
from dynamo_local.supervisor.server.reports.event_log import EventReader
from dynamo_local.supervisor.server.reports.event_sources import DeviceEvents, PresenceEvents, ServerEvents
from state.paths import StatePaths
from state.statefile.model import Component, Owner, Resources, State
from tests.unit.supervisor.recording import RecordingReport

STARTING = Presence("ns_W", "W", "decode", "first", 7, "starting", started_at=10.0)
READY = replace(STARTING, state="ready")


class Told:
    """Events of presences, at a time of 12.5 s."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._source = PresenceEvents(self.events.append, clock=lambda: 12.5)

    def see(self, presence: Presence, what: Happened = Happened.UPDATED) -> list[tuple[str, str, str]]:
        self.events.clear()
        self._source.on_change(Change(what, presence))
        assert all(event.watcher == "ns_W" and event.pid == 7 for event in self.events)
        return [(event.kind, event.what, event.why) for event in self.events]


def test_a_process_starts_and_is_ready() -> None:
    told = Told()
    assert told.see(STARTING, Happened.APPEARED) == [("start", "started", "")]
    assert told.see(replace(STARTING, detail="loading")) == []
    assert told.see(READY) == [("start", "ready 2.5 s after its start", "")]
    assert told.see(replace(READY, detail="more")) == []


def test_a_process_that_was_silent_for_a_while_has_not_started_again() -> None:
    told = Told()
    told.see(READY, Happened.APPEARED)
    assert told.see(READY, Happened.LEFT) == []
    assert told.see(READY, Happened.APPEARED) == []
    again = told.see(replace(READY, lease="second"), Happened.APPEARED)
    assert [what for _, what, _ in again] == ["started", "ready 2.5 s after its start"]


def test_a_worker_changes_its_role() -> None:
    told = Told()
    told.see(READY, Happened.APPEARED)
    assert told.see(replace(READY, role="prefill")) == [("role", "role is prefill", "it was decode")]


def test_a_worker_parks_and_wakes() -> None:
    told = Told()
    told.see(READY, Happened.APPEARED)
    parked = replace(READY, state="parked")
    assert told.see(parked) == [("park", "parked", "")]
    assert told.see(replace(parked, detail="still")) == []
    # Unheard for a while.
    assert told.see(parked, Happened.LEFT) == []
    assert told.see(parked, Happened.APPEARED) == []
    assert told.see(READY) == [("park", "awake", "")]


def test_two_signs_of_a_drain_are_one_event() -> None:
    told = Told()
    told.see(READY, Happened.APPEARED)
    assert told.see(READY, Happened.REVOKED) == [("drain", "draining", "its lease is revoked")]
    assert told.see(replace(READY, state="draining")) == []


def test_an_engine_that_fails_is_a_death() -> None:
    told = Told()
    told.see(READY, Happened.APPEARED)
    failed = replace(READY, state="failed", detail="EngineCore died")
    assert told.see(failed, Happened.LEFT) == [("death", "engine failed", "EngineCore died")]


def state(**devices: tuple[int, ...] | None) -> State:
    components = {
        f"ns_{name}": Component(f"ns_{name}", "W", "decode", "cmd", Resources(allocated))
        for name, allocated in devices.items()
    }
    owner = Owner(pid=1, start_time=1)
    return State(namespace="ns", circus_endpoint="ipc://x", device_kind="cpu-slot", owner=owner, components=components)


def test_shares_of_devices_are_claimed_and_freed() -> None:
    events: list[Event] = []
    source = DeviceEvents(events.append)
    shared = state(W=(0,))
    entry = replace(shared.components["ns_W"], resources=Resources((0,), 0.5))
    source.on_state(replace(shared, components={"ns_W": entry}))
    source.on_state(state(W=None))
    assert [event.what for event in events] == ["claimed 0.5 of CPU slot 0", "freed 0.5 of CPU slot 0"]


def test_devices_are_claimed_and_freed() -> None:
    events: list[Event] = []
    source = DeviceEvents(events.append)
    for each in (state(W=(0,)), state(W=(0,)), state(W=(0,), W_1=(1, 2)), state(W=None)):
        source.on_state(each)
    assert [(event.watcher, event.what, event.devices) for event in events] == [
        ("ns_W", "claimed CPU slot 0", (0,)),
        ("ns_W_1", "claimed CPU slots 1, 2", (1, 2)),
        ("ns_W", "freed CPU slot 0", (0,)),
        ("ns_W_1", "freed CPU slots 1, 2", (1, 2)),
    ]


def test_devices_of_nodes_are_claimed_and_freed_there() -> None:
    events: list[Event] = []
    source = DeviceEvents(events.append)
    there = state(W=(0,))
    for node in ("a" * 56, "b"):
        entry = replace(there.components["ns_W"], node=node)
        source.on_state(replace(there, components={"ns_W": entry}))
    # Lost with one node, and added on another one.
    assert [event.what for event in events] == [
        f"claimed CPU slot 0 of node {'a' * 12}",
        f"freed CPU slot 0 of node {'a' * 12}",
        "claimed CPU slot 0 of node b",
    ]


def test_the_life_of_a_server_is_recorded(tmp_path: Path) -> None:
    paths = StatePaths(tmp_path, "ns")
    paths.logs_dir.mkdir()
    events = ServerEvents(paths, RecordingReport())
    with events.of_server("graphs.agg:Frontend"):
        events.ready("API ready at http://127.0.0.1:8000")
        events.stopping()
    with pytest.raises(SupervisorError), events.of_server("graphs.agg:Frontend"):
        raise SupervisorError("no")
    found = [(event.what, event.why) for event in EventReader(paths.events_file).all()]
    assert found == [
        ("starting graphs.agg:Frontend", ""),
        ("API ready at http://127.0.0.1:8000", ""),
        ("stopping", ""),
        ("stopped", ""),
        ("starting graphs.agg:Frontend", ""),
        ("failed", "no"),
    ]
