"""The planner's options. Command line, configuration section and documentation are generated from these fields.

A field's metadata has its `help` and its bounds. Values out of bounds and contradictory options raise ConfigError.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from dynamo_local.core.errors import ConfigError
from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.shares import fits


def _option(
    default: Any, help: str, *, at_least: float | None = None, above: float | None = None, at_most: float | None = None
) -> Any:
    return field(default=default, metadata={"help": help, "at_least": at_least, "above": above, "at_most": at_most})


@dataclass(frozen=True)
class PlannerOptions:
    """Options of the planner. Times are seconds. Budgets count devices: GPUs, or CPU slots where there are none."""

    served_model_name: str = _option("vllm", "Name of the model in recorded decisions and metrics.")
    no_operation: bool = _option(False, "Only observe: record decisions and change nothing.")
    log_dir: str | None = _option(
        None,
        "Folder for decisions.jsonl and TensorBoard event files. Without it, decisions.jsonl is among the logs, "
        "and no event files are written.",
    )
    dynamo_tags: bool = _option(
        False, "Also write TensorBoard series under the names of Dynamo's planner, such as average_kv_load."
    )
    event_files_max_mib: int = _option(
        64, "Maximum size of all event files in log-dir, in MiB; the oldest are removed.", at_least=1
    )
    adjustment_interval: float = _option(
        30.0, "Time between decisions to add or remove workers, in s.", above=0, at_most=86400
    )
    metric_pulling_interval: float = _option(
        1.0, "Time between two readings of the metrics, in s.", above=0, at_most=3600
    )
    max_gpu_budget: int = _option(
        8,
        "Maximum number of devices of all workers together. Devices that other servers hold do not count as available.",
        at_least=1,
    )
    min_gpu_budget: int = _option(1, "Minimum number of devices of the workers of each role.", at_least=1)
    min_endpoint: int = _option(1, "Minimum number of workers of each role.", at_least=1)
    decode_kv_scale_up_threshold: float = _option(
        0.9, "Mean KV cache usage above which a decode or aggregated worker is added.", above=0, at_most=1
    )
    decode_kv_scale_down_threshold: float = _option(
        0.5, "Mean KV cache usage below which a decode or aggregated worker is removed.", at_least=0, at_most=1
    )
    prefill_queue_scale_up_threshold: float = _option(
        0.5, "Mean number of waiting prefill jobs per prefill worker above which a prefill worker is added.", above=0
    )
    prefill_queue_scale_down_threshold: float = _option(
        0.2,
        "Mean number of waiting prefill jobs per prefill worker below which a prefill worker is removed.",
        at_least=0,
    )
    decode_engine_num_gpu: int = _option(1, "Devices of a decode or aggregated worker.", at_least=1)
    prefill_engine_num_gpu: int = _option(1, "Devices of a prefill worker.", at_least=1)
    environment: Literal["local"] = _option("local", "Where the workers run: on this machine.")
    policy: Literal["load", "freeness", "concurrency", "dynamo"] = _option(
        "load",
        "Policy that decides the number of workers: by KV cache usage and queue length (load), by freeness, "
        "by requests in flight (concurrency), or by the rules of Dynamo's planner alone, without switches of roles "
        "(dynamo).",
    )
    freeness_scale_up_threshold: float = _option(
        50.0, "Policy freeness: mean freeness (steps until the KV cache is full) below which a worker is added."
    )
    freeness_scale_down_threshold: float = _option(
        500.0, "Policy freeness: mean freeness (steps until the KV cache is full) above which a worker is removed."
    )
    freeness_hold_intervals: int = _option(
        2,
        "Policy freeness: number of adjustment intervals for which a threshold must be passed.",
        at_least=1,
        at_most=100,
    )
    requests_per_worker: float = _option(
        16.0, "Policy concurrency: requests in flight per decode or aggregated worker.", above=0
    )
    prefill_requests_per_worker: float = _option(
        4.0, "Policy concurrency: prefill jobs, waiting and running, per prefill worker.", above=0
    )
    concurrency_window: float = _option(
        120.0,
        "Policy concurrency: time over which the highest number of requests counts, in s.",
        at_least=0,
        at_most=86400,
    )
    endpoint_concurrency_window: float = _option(
        600.0,
        "Endpoints with policy concurrency: time over which the highest number of requests counts, in s.",
        at_least=0,
        at_most=86400,
    )
    change_timeout: float = _option(
        300.0, "How long an action may take, in s. A new worker that is not ready by then is removed again.", above=0
    )

    def __post_init__(self) -> None:
        for spec in fields(self):
            _check_bounds(spec.name, getattr(self, spec.name), **{name: spec.metadata[name] for name in _BOUNDS})
        _check_below("min_gpu_budget", "max_gpu_budget", self, equal=True)
        _check_below("decode_engine_num_gpu", "max_gpu_budget", self, equal=True)
        _check_below("prefill_engine_num_gpu", "max_gpu_budget", self, equal=True)
        _check_below("decode_kv_scale_down_threshold", "decode_kv_scale_up_threshold", self)
        _check_below("prefill_queue_scale_down_threshold", "prefill_queue_scale_up_threshold", self)
        _check_below("freeness_scale_up_threshold", "freeness_scale_down_threshold", self)
        _check_below("metric_pulling_interval", "adjustment_interval", self, equal=True)

    def devices_of_engine(self, role: str) -> int:
        """Return the number of devices that an engine of that role takes."""
        return self.prefill_engine_num_gpu if role == PREFILL_ROLE else self.decode_engine_num_gpu

    def max_devices(self, inventory: int | None) -> int:
        """Return the budget on a machine with `inventory` devices (None: unknown)."""
        return self.max_gpu_budget if inventory is None else min(self.max_gpu_budget, inventory)

    def check_fits(self, devices: float) -> None:
        """Raise ConfigError if `devices`, held by all workers together, exceed the budget of a planner that acts."""
        if not self.no_operation and not fits(0, devices, self.max_gpu_budget):
            raise ConfigError(
                f"max-gpu-budget is {self.max_gpu_budget}, and the workers hold {devices:g} devices",
                "raise max-gpu-budget, start fewer workers, or use --no-operation",
            )


_BOUNDS = ("at_least", "above", "at_most")


def key(name: str) -> str:
    """Return a field's name as users spell it: in kebab-case."""
    return name.replace("_", "-")


def _check_bounds(
    name: str, value: object, *, at_least: float | None, above: float | None, at_most: float | None
) -> None:
    if not isinstance(value, int | float):
        return
    if not math.isfinite(value):
        raise ConfigError(f"{key(name)} is {value}", "it must be a finite number")
    if at_least is not None and value < at_least:
        raise ConfigError(f"{key(name)} is {value}", f"it must be at least {at_least}")
    if above is not None and value <= above:
        raise ConfigError(f"{key(name)} is {value}", f"it must be above {above}")
    if at_most is not None and value > at_most:
        raise ConfigError(f"{key(name)} is {value}", f"it must be at most {at_most}")


def _check_below(lower: str, upper: str, options: PlannerOptions, *, equal: bool = False) -> None:
    low, high = getattr(options, lower), getattr(options, upper)
    if low < high or (equal and low == high):
        return
    must = "at most" if equal else "below"
    raise ConfigError(f"{key(lower)} is {low}, {key(upper)} {high}", f"{key(lower)} must be {must} {key(upper)}")
