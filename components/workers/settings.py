"""The configuration keys of a worker: its own, and those of its engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from components.vllm import PRELOAD
from components.workers.listed_adapters import BoardAdapters
from components.workers.warming import DEFAULT_SHARE
from dynamo_local.core.http.bounds.request import RequestBounds
from dynamo_local.core.names import MAIN, endpoint_of
from dynamo_local.core.ports import Engine
from dynamo_local.engine.kv.network import NetworkSettings, far_kv_here
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.engine.vllm.arguments import adapter_schema, engine_schema, ranks_of
from dynamo_local.engine.vllm.settings import VllmSettings
from dynamo_local.process.context import ServiceContext
from dynamo_local.sdk.config.schema import SchemaTable, combine, schema_of
from dynamo_local.sdk.resources import DeviceUse
from state.paths import StatePaths

_MOST_SHARE = 0.9
"""Beyond that, blocks that the worker's own requests have left would be dropped for others'."""


@dataclass(frozen=True)
class WorkerSettings:
    """Keys of the worker itself."""

    engine: Literal["vllm", "mocker"] = field(
        default="vllm",
        metadata={"help": "Engine of the worker. The mocker runs no model; it is for tests of scaling and faults."},
    )
    stall_timeout_s: float = field(
        default=120.0,
        metadata={
            "help": "How long an engine with requests may make no step before it is restarted, in s. "
            "Time without a core does not count."
        },
    )
    drain_timeout_s: float = field(
        default=15.0,
        metadata={"help": "How long requests that cannot migrate may take to finish when the worker stops, in s."},
    )
    kv_transfer: bool = field(
        default=False,
        metadata={
            "help": "Whether KV blocks are copied between workers, for migration and disaggregated prefill, "
            "if the model supports it. Required with prefill workers."
        },
    )
    grammar_timeout_s: float = field(
        default=RequestBounds.grammar_timeout_s,
        metadata={"help": "Maximum time to compile a grammar, in s. After that its request fails.", "above": 0},
    )
    prefill_batch: int = field(
        default=4,
        metadata={"help": "Number of prefill jobs that a prefill worker computes at the same time.", "at_least": 1},
    )

    hot_prefix_share: float = field(
        default=DEFAULT_SHARE,
        metadata={
            "help": "Fraction of the KV cache that a new worker fills with the prefixes that others are asked for "
            "most, pulled from them (kv-transfer). 0 turns that off.",
            "at_least": 0,
            "at_most": _MOST_SHARE,
        },
    )

    def __post_init__(self) -> None:
        if not 0 <= self.hot_prefix_share <= _MOST_SHARE:
            raise ValueError(f"hot-prefix-share must be from 0 to {_MOST_SHARE:g}, not {self.hot_prefix_share:g}")
        if self.prefill_batch < 1:
            raise ValueError(f"prefill-batch must be at least 1, not {self.prefill_batch}")
        if self.grammar_timeout_s <= 0:
            raise ValueError(f"grammar-timeout-s must be positive, not {self.grammar_timeout_s:g}")


def worker_schema() -> SchemaTable:
    """All keys that a worker takes."""
    settings = (WorkerSettings, VllmSettings, MockerSettings, NetworkSettings)
    return combine(*map(schema_of, settings), engine_schema(), adapter_schema())


def preload_of(config: Mapping[str, Any]) -> str | None:
    """The module that the fork server imports before a worker with this configuration starts."""
    return PRELOAD if config.get("engine", WorkerSettings.engine) == "vllm" else None


def devices_of(config: Mapping[str, Any]) -> DeviceUse:
    """How a worker with this configuration uses its devices: vLLM runs a rank on each, the mocker uses none."""
    if config.get("engine", WorkerSettings.engine) == "mocker":
        return DeviceUse(virtual=True)
    return DeviceUse(ranks=ranks_of(config))


def make_engine(context: ServiceContext) -> Engine:
    """The engine that the configuration names, not started yet."""
    if context.settings(WorkerSettings).engine == "mocker":
        from dynamo_local.engine.mocker.engine import MockerEngine

        # As vLLM does: the first name under which the model is served, which `dynamo ls` and the start show.
        far = far_kv_here(context.settings(NetworkSettings), bus_host=context.bus.secure_host)
        names = context.config.get("served-model-name") or [context.config.get("model", "mocker")]
        return MockerEngine(
            context.settings(MockerSettings), context.private_dir, model=names[0], kv_network=far.network
        )
    from dynamo_local.engine.vllm.engine import VllmEngine

    settings = context.settings(WorkerSettings)
    return VllmEngine(
        context.config,
        context.private_dir,
        kv_transfer=settings.kv_transfer,
        grammar_timeout_s=settings.grammar_timeout_s,
        tasks=context.tasks,
        listed=_listed_adapters(context),
        bus_host=context.bus.secure_host,
        # Those of the graph itself are not parked.
        parks=endpoint_of(context.revision) != MAIN,
    )


def _listed_adapters(context: ServiceContext) -> BoardAdapters | None:
    """The adapters of the worker's endpoint; None for a worker of the graph: its adapters are in its configuration."""
    if endpoint_of(context.revision) == MAIN:
        return None
    return BoardAdapters(StatePaths.of(context.namespace, os.environ).board_file, context.revision)
