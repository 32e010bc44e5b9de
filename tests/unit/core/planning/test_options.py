"""The planner's options: what is given, and what is refused."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from dynamo_local.core.errors import ConfigError
from dynamo_local.core.planning.options import PlannerOptions


def test_the_documented_defaults() -> None:
    options = PlannerOptions()
    assert (options.served_model_name, options.no_operation, options.log_dir) == ("vllm", False, None)
    assert (options.adjustment_interval, options.metric_pulling_interval) == (30, 1)
    assert (options.max_gpu_budget, options.min_gpu_budget) == (8, 1)
    assert (options.decode_kv_scale_up_threshold, options.decode_kv_scale_down_threshold) == (0.9, 0.5)
    assert (options.prefill_queue_scale_up_threshold, options.prefill_queue_scale_down_threshold) == (0.5, 0.2)
    assert (options.decode_engine_num_gpu, options.prefill_engine_num_gpu) == (1, 1)
    assert (options.environment, options.policy) == ("local", "load")


def test_every_option_says_what_it_is() -> None:
    for spec in fields(PlannerOptions):
        assert spec.metadata["help"], spec.name


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"decode_kv_scale_down_threshold": 0.9}, "decode-kv-scale-down-threshold must be below"),
        ({"prefill_queue_scale_down_threshold": 0.5}, "prefill-queue-scale-down-threshold must be below"),
        ({"freeness_scale_up_threshold": 500.0}, "freeness-scale-up-threshold must be below"),
        ({"min_gpu_budget": 9}, "min-gpu-budget must be at most max-gpu-budget"),
        ({"decode_engine_num_gpu": 9}, "decode-engine-num-gpu must be at most max-gpu-budget"),
        ({"metric_pulling_interval": 31.0}, "metric-pulling-interval must be at most adjustment-interval"),
        ({"min_gpu_budget": 0}, "it must be at least 1"),
        ({"adjustment_interval": 0.0}, "it must be above 0"),
        ({"decode_kv_scale_up_threshold": 1.5}, "it must be at most 1"),
        ({"change_timeout": float("nan")}, "it must be a finite number"),
        ({"freeness_hold_intervals": 0}, "it must be at least 1"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_in_one_line(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PlannerOptions(**wrong)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_budget_below_what_runs_is_refused_unless_nothing_is_changed() -> None:
    options = PlannerOptions(max_gpu_budget=2)
    options.check_fits(2)
    with pytest.raises(ConfigError, match="max-gpu-budget is 2, and the workers hold 3 devices"):
        options.check_fits(3)
    replace(options, no_operation=True).check_fits(3)


@pytest.mark.parametrize(("inventory", "most"), [(None, 8), (2, 2), (16, 8)])
def test_no_more_devices_than_there_are(inventory: int | None, most: int) -> None:
    assert PlannerOptions().max_devices(inventory) == most
