"""The fleet that the planner is measured on: pretended devices, and the arms that are compared on them.

Each worker is a mocker that takes the time an NVIDIA A10 would, serving Llama 3.1 8B with weights and arithmetic in 8
bits and its KV cache in 16 (32 layers, 8 KV heads of 128: 128 KiB a token). Nobody measured that here. It follows from
the card's data sheet (250 TOP/s, 600 GB/s, 24 GB), of which 55 % of the arithmetic and 85 % of the bandwidth are taken
to be reached:

    a step            8.03 GB of weights are read                              15.7 ms
    a prompt token    16.1 GOP                                                 115 us
    a decoding one    400 MB are read, the KV cache of 3,075 tokens            790 us
    the KV cache      12.6 GB are left: 3,000 blocks of 32 tokens              30 requests of 3,000 + 150 tokens
    a transfer        the mocker's default: 25 GiB/s and 2 ms

So a prefill worker takes 2.7 prompts of 3,000 tokens a second, and a decode worker, when its cache is full, finishes
5.1 requests of 150 tokens a second, at 39 ms a token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.models import RANDOM, model_folder
from benchmarks.harness.servers import Server, start_ours
from dynamo_local.core.errors import UsageError

DEVICES = 8
READY_S = 1.8
"""One more real worker takes so long here, by the benchmark `startup`; 10.1 if it imports vLLM by itself."""
_OWN_START_S = 0.5
"""What a forked worker process takes without an engine."""

PROFILE: dict[str, Any] = {
    "engine": "mocker",
    "mocker-step-base-ms": 15.7,
    "mocker-prefill-us-per-token": 115,
    "mocker-decode-us-per-seq": 790,
    "mocker-kv-blocks": 3000,
    "mocker-block-size": 32,
    "mocker-max-num-batched-tokens": 2048,
    "mocker-max-model-len": 4096,
    # A prompt of 3,000 tokens fills a step: two at once would only make both late. Dynamo takes one as well.
    "prefill-batch": 1,
}
"""Settings of every worker, of either role."""

_INTERVAL = "Planner.adjustment-interval"
FITTED: dict[str, Any] = {
    # Where a worker starts in 1.8 s, looking for longer only makes it late.
    _INTERVAL: 4,
    # Two jobs that wait for each worker are 0.7 s, a third of what a first token may take.
    "Planner.prefill-queue-scale-up-threshold": 2,
    "Planner.prefill-queue-scale-down-threshold": 0.5,
    # A step of few requests is quicker, so that what two workers hold at 0.4 each fills one.
    "Planner.decode-kv-scale-down-threshold": 0.3,
}
"""Settings of the planner that suit this fleet and its objective, as somebody who knows both would choose them."""

_LAYOUT = re.compile(r"(?P<prefill>[1-9][0-9]?)P(?P<decode>[1-9][0-9]?)D")
_PLANNER = re.compile(r"planner(:(?P<how>load|freeness|concurrency|fitted))?")


@dataclass(frozen=True)
class Layout:
    """Workers of each role, a device each."""

    prefill: int
    decode: int

    @property
    def devices(self) -> int:
        return self.prefill + self.decode


FIRST = Layout(1, 1)
"""What the planner begins with."""


@dataclass(frozen=True)
class Arm:
    """A way to run the fleet: a layout that stays, or, with a policy, one that a planner changes. `fitted`: with
    the settings that suit this fleet."""

    name: str
    layout: Layout
    policy: str | None = None
    fitted: bool = False


def parse_arm(text: str) -> Arm:
    """ "2P2D", "planner", "planner:fitted" or "planner:freeness". Raises UsageError."""
    if match := _LAYOUT.fullmatch(text):
        layout = Layout(int(match["prefill"]), int(match["decode"]))
        if layout.devices <= DEVICES:
            return Arm(text, layout)
    if match := _PLANNER.fullmatch(text):
        how = match["how"] or "load"
        return Arm(text, FIRST, "load", fitted=True) if how == "fitted" else Arm(text, FIRST, how)
    remedy = f"write 2P2D (at most {DEVICES} workers), planner, planner:fitted or planner:POLICY"
    raise UsageError(f"{text!r} is no arm", remedy)


@dataclass(frozen=True)
class Pace:
    """Seconds: how often the planner looks, how often it changes something (None: as suits the arm), and what a new
    worker takes to be ready."""

    metric_s: float = 0.5
    adjustment_s: float | None = None
    ready_s: float = READY_S


def start_arm(folder: Path, arm: Arm, pace: Pace, more: Mapping[str, str]) -> Server:
    """The fleet of an arm, on the disaggregated example graph. `more` are further settings of `dynamo serve`."""
    worker = PROFILE | {"mocker-start-s": max(pace.ready_s - _OWN_START_S, 0.0)}
    settings: dict[str, Any] = {
        "cpu-slots": DEVICES,
        "Frontend.max-model-len": PROFILE["mocker-max-model-len"],
        **{f"{service}.{key}": value for service in ("VllmWorker", "PrefillWorker") for key, value in worker.items()},
        "VllmWorker.ServiceArgs.workers": arm.layout.decode,
        "PrefillWorker.ServiceArgs.workers": arm.layout.prefill,
        **_planner_settings(arm, pace),
    }
    return start_ours(folder, str(model_folder(RANDOM)), "disagg", settings | dict(more))


def _planner_settings(arm: Arm, pace: Pace) -> dict[str, Any]:
    if arm.policy is None:
        return {"Planner.no-operation": True}
    asked = {} if pace.adjustment_s is None else {_INTERVAL: pace.adjustment_s}
    return {
        "Planner.no-operation": False,
        "Planner.policy": arm.policy,
        "Planner.metric-pulling-interval": pace.metric_s,
        _INTERVAL: 5,
        "Planner.max-gpu-budget": DEVICES,
        **(FITTED if arm.fitted else {}),
        **asked,
    }
