"""Servers of mocker processes that get the requests of a simulation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.harness.load import LETTERS
from benchmarks.harness.models import RANDOM, model_folder
from benchmarks.harness.servers import Server, start_ours
from dynamo_local.core.routing.policies import DEFAULT
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.load.workload import Planned
from dynamo_local.sim.requests import Arrival

MAX_IN_FLIGHT = 1_000
_NAMES = ("kv_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "speedup")


@dataclass(frozen=True)
class Prompts:
    """Token ids of the arrivals' prompts: of equal keys, equal ones."""

    arrivals: Sequence[Arrival]
    block_tokens: int

    def planned(self) -> list[Planned]:
        """The arrivals, for a generator of load."""
        return [Planned(each.at, each.prompt_tokens, each.output_tokens) for each in self.arrivals]

    def write(self, index: int, _: Planned) -> bytes:
        return msgspec.json.encode(self._token_ids(self.arrivals[index]))

    def _token_ids(self, arrival: Arrival) -> list[int]:
        found: list[int] = []
        for key in arrival.keys:
            found += random.Random(f"block {key}").choices(LETTERS, k=self.block_tokens)
        own = random.Random(f"own {arrival.number}")
        return found + own.choices(LETTERS, k=arrival.prompt_tokens - len(found))


def start_mockers(
    folder: Path,
    settings: MockerSettings,
    workers: int,
    *,
    most_workers: int,
    hot_prefix_share: float,
    policy: str = DEFAULT,
) -> Server:
    """A server whose workers are mockers with these settings. `most_workers`: slots for workers. `policy`: the
    router's."""
    keys = {f"VllmWorker.mocker-{name.replace('_', '-')}": getattr(settings, f"mocker_{name}") for name in _NAMES}
    overrides = {
        "cpu-slots": most_workers,
        "Frontend.max-model-len": settings.mocker_max_model_len,
        "Router.policy": policy,
        "VllmWorker.ServiceArgs.workers": workers,
        "VllmWorker.engine": "mocker",
        "VllmWorker.block-size": settings.mocker_block_size,
        "VllmWorker.max-model-len": settings.mocker_max_model_len,
        "VllmWorker.hot-prefix-share": hot_prefix_share,
        **keys,
    }
    return start_ours(folder, str(model_folder(RANDOM)), "agg_router", overrides)
