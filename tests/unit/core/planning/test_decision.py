"""Decisions in words: what a planner does, what one that only observes would do, and what is the same again."""

from __future__ import annotations

import pytest

from dynamo_local.core.planning.actions import (
    Action,
    ActionOutcome,
    AddWorker,
    RemoveWorker,
    Restart,
    SwitchRole,
)
from dynamo_local.core.planning.decision import Decision, Verdict, event_of
from dynamo_local.core.planning.options import PlannerOptions
from tests.unit.core.planning.fleets import decision_of, prefiller, pull, worker

REMOVE = RemoveWorker("ns_VllmWorker_1", "decode")


def decision(load: float, *actions: Action, acts: bool = True, reason: str = "is below 0.5") -> Decision:
    verdict = Verdict("decode", -1 if actions else 0, f"load {load:.2f} {reason}")
    return Decision(0.0, "load", (verdict,), actions, 2, 4, acts)


def test_a_planner_that_acts_says_what_it_does_and_one_that_observes_what_it_would_do() -> None:
    assert decision(0.1, REMOVE).text == "remove VllmWorker_1 (decode: load 0.10 is below 0.5)"
    assert decision(0.1, REMOVE, acts=False).text == "would remove VllmWorker_1 (decode: load 0.10 is below 0.5)"
    several = decision(0.1, AddWorker("aggregated"), SwitchRole("ns_A", "decode", "prefill"), acts=False)
    assert several.change == "would add an aggregated worker, would switch A to prefill"
    assert decision(0.6).change == decision(0.6, acts=False).change == "no change"


@pytest.mark.parametrize("observes", [True, False])
def test_no_operation_decides_which_words_are_used(observes: bool) -> None:
    # One prefill worker is idle and the decode worker is full: one of the prefill workers switches.
    found = pull(worker(kv=0.95), prefiller(), prefiller("PrefillWorker_1"))
    options = PlannerOptions(max_gpu_budget=4, no_operation=observes)
    made = decision_of(found, options, ())
    assert made.acts is not observes
    assert made.change.startswith("would ") is observes
    assert any("would switch" in verdict.reason for verdict in made.verdicts) is observes
    assert any("switches" in verdict.reason for verdict in made.verdicts) is not observes


def test_a_decision_is_the_same_again_if_only_its_figures_differ() -> None:
    assert decision(0.1).gist == decision(0.2).gist
    assert decision(0.1).gist != decision(0.1, REMOVE).gist
    assert decision(0.1).gist != decision(0.1, reason="is above 0.9").gist
    assert decision(0.1, REMOVE).gist != decision(0.1, REMOVE, acts=False).gist
    assert decision(0.1, REMOVE).gist != decision(0.1, RemoveWorker("ns_VllmWorker_2", "decode")).gist


@pytest.mark.parametrize(
    ("action", "done", "watcher", "note", "what"),
    [
        (AddWorker("decode"), True, "ns_W_2", "ready", "added in 1.5 s"),
        (AddWorker("decode"), False, None, "no device is free", "not added: no device is free"),
        (REMOVE, True, "ns_VllmWorker_1", "ended", "removed in 1.5 s"),
        (REMOVE, False, None, "it is gone", "not removed: it is gone"),
        (SwitchRole("ns_A", "decode", "prefill"), True, "ns_A", "in the role", "switched to prefill in 1.5 s"),
        (Restart("ns_A", "decode"), True, "ns_A_1", "in place of ns_A", "restarted in place of A in 1.5 s"),
    ],
)
def test_an_action_that_is_over_is_an_event(
    action: Action, done: bool, watcher: str | None, note: str, what: str
) -> None:
    event = event_of(ActionOutcome(action, done, watcher, note, 1.5), "`dynamo scale`")
    named = watcher or getattr(action, "watcher", "")
    assert (event.kind, event.what, event.why, event.watcher) == ("scale", what, "`dynamo scale`", named)


def test_workers_with_shares_of_devices_count_as_shares() -> None:
    options = PlannerOptions(max_gpu_budget=2, no_operation=False)
    full = [worker(f"VllmWorker_{n}", kv=0.99, waiting=9, devices=0.5) for n in range(3)]
    made = decision_of(pull(*full, templates={"decode": "VllmWorker"}), options, ())
    assert (made.devices, made.actions) == (1.5, (AddWorker("decode", "VllmWorker"),))
    full.append(worker("VllmWorker_3", kv=0.99, waiting=9, devices=0.5))
    made = decision_of(pull(*full, templates={"decode": "VllmWorker"}), options, ())
    assert (made.devices, made.actions) == (2, ())
    assert made.verdicts[0].reason.endswith("the budget has 0 devices left, 0.5 needed")


def test_a_worker_with_a_share_is_as_good_as_one_with_a_device_for_the_minimum() -> None:
    options = PlannerOptions(max_gpu_budget=2, min_gpu_budget=1, no_operation=False)
    made = decision_of(pull(worker(devices=0.5), templates={"decode": "VllmWorker"}), options, ())
    assert made.actions == ()
