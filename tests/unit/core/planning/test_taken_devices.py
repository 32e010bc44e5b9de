"""The graph's own workers and endpoints share one budget."""

from __future__ import annotations

from dataclasses import replace

from dynamo_local.core.planning.actions import AddWorker, RemoveWorker
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.proposals import held_after
from dynamo_local.core.planning.window import aggregate
from tests.unit.core.planning.fleets import decision_of, prefiller, pull, reason_of, worker


def test_devices_of_endpoints_count_as_taken() -> None:
    busy = pull(worker(kv=0.95), prefiller(busy=True))
    options = PlannerOptions(max_gpu_budget=4)
    assert decision_of(replace(busy, taken=1), options).actions == (AddWorker("decode", "VllmWorker"),)
    full = decision_of(replace(busy, taken=1.5), options)
    assert (full.actions, full.devices) == ((), 3.5)
    assert "the budget has 0.5 devices left, 1 needed" in reason_of(full, "decode")


def test_what_an_added_worker_takes_is_promised_before_it_starts() -> None:
    options = PlannerOptions()
    window = aggregate([pull(worker(kv=0.95, devices=2), prefiller())])
    assert held_after(window, (), options) == 3
    assert held_after(window, (AddWorker("decode"),), options) == 5
    assert held_after(window, (RemoveWorker("ns_VllmWorker", "decode"),), options) == 3
