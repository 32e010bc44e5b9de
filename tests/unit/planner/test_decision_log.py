"""Decisions on disk: a line of JSON each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynamo_local.core.errors import ConfigError
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.planning.actions import Action, ActionOutcome, AddWorker, OrderOutcome
from dynamo_local.core.planning.decision import Decision
from dynamo_local.planner.decision_log import DecisionLog
from tests.unit.core.planning.endpoint_fleets import decided, pull, seen, spec

ADD = AddWorker("decode", "VllmWorker")


def decided_on(actions: tuple[Action, ...] = (ADD,)) -> Decision:
    return Decision(10.0, "load", (), actions, 2, 4)


def test_a_decision_is_a_line_of_json(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "new" / "decisions.jsonl", {"model": "m"}, wall_clock=lambda: 5.0)
    log.decided(decided_on(), (ActionOutcome(ADD, False, None, "no", 1.23456),))
    log.decided(decided_on(()), ())
    first, second = map(json.loads, log.path.read_text().splitlines())
    assert (first["time"], first["model"], first["policy"], first["devices"]) == (5.0, "m", "load", 2)
    assert first["actions"] == [{"action": "AddWorker", "role": "decode", "component": "VllmWorker"}]
    assert first["outcomes"] == [
        {"action": "add a decode worker", "done": False, "watcher": None, "note": "no", "took_s": 1.235}
    ]
    assert (second["actions"], second["outcomes"]) == ([], [])
    assert log.path.stat().st_mode & 0o077 == 0


def test_the_log_takes_a_bounded_place_on_disk(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "decisions.jsonl", {}, max_bytes=1000)
    for _ in range(50):
        log.decided(decided_on(), ())
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["decisions.jsonl", "decisions.jsonl.1"]
    assert all(0 < file.stat().st_size <= 1000 for file in files)
    assert all(json.loads(line) for file in files for line in file.read_text().splitlines())


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write decisions"):
        DecisionLog(tmp_path / "file" / "decisions.jsonl", {})


def test_a_decision_about_a_number_is_a_line_of_json_with_its_figures(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "decisions.jsonl", {"namespace": "ns", "model": "m", "acts": True})
    log.decided(decided(pull(seen(spec(), in_flight=100)))["chat"], (OrderOutcome(True),))
    line = json.loads(log.path.read_text())
    assert line["time"] > 0
    assert {key: line[key] for key in ("namespace", "endpoint", "policy", "acts", "devices", "max_devices")} == {
        "namespace": "ns", "endpoint": "chat", "policy": "concurrency", "acts": True, "devices": 1, "max_devices": 8
    }  # fmt: skip
    assert "model" not in line, "that is the graph's own"
    assert line["order"] == {"workers": 7, "prefill_workers": None}
    assert line["outcome"] == {"done": True, "note": ""}
    role = line["roles"][0]
    assert (role["ordered"], role["wanted"], role["gets"], role["order"], role["ready"]) == (1, 7, 7, 7, 1)
    assert (role["in_flight"], role["most_in_flight"]) == (100, 100)


def test_what_the_server_does_by_itself_is_a_line_of_json(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "decisions.jsonl", {"namespace": "ns", "model": "m", "acts": True})
    log.changed(Event("park", "parked", "no request for 60 s", endpoint="chat", cause="idle"))
    log.changed(Event("swap", "yields its device to code", "asked for", endpoint="chat", to="code"))
    log.changed(Event("wake", "awake after 0.52 s", endpoint="chat", cause="request", took_s=0.52))
    park, swap, wake = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert park.pop("time") > 0
    assert park == {
        "namespace": "ns", "endpoint": "chat", "change": "park", "cause": "idle",
        "text": "chat: parked (no request for 60 s)",
    }  # fmt: skip
    assert (swap["change"], swap["to"], swap["took_s"]) == ("swap", "code", None)
    assert (wake["cause"], wake["took_s"], wake["text"]) == ("request", 0.52, "chat: awake after 0.52 s")
