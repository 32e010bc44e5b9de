"""The configuration keys of a worker: its own, and those of its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dynamo_local.core.http.bounds import RequestBounds
from dynamo_local.core.ports import Engine
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.engine.vllm import VLLM_PRELOAD
from dynamo_local.engine.vllm.arguments import adapter_schema, engine_schema, ranks_of
from dynamo_local.engine.vllm.kv.neighbours import NeighbourSettings
from dynamo_local.process.context import ServiceContext
from dynamo_local.sdk.config.schema import SchemaTable, combine, schema_of
from dynamo_local.sdk.resources import DeviceUse


@dataclass(frozen=True)
class WorkerSettings:
    """Keys of the worker itself."""

    engine: Literal["vllm", "mocker"] = field(
        default="vllm", metadata={"help": "vllm, or mocker: no model, for tests of fleets and faults"}
    )
    stall_timeout_s: float = field(
        default=120.0,
        metadata={
            "help": "an engine that makes no step for so long, with requests to work on and a core, is restarted"
        },
    )
    drain_timeout_s: float = field(
        default=15.0, metadata={"help": "how long requests under way may take to finish when the worker ends"}
    )
    kv_transfer: bool = field(
        default=False,
        metadata={
            "help": "lend KV blocks to other workers, and pull theirs, where the model allows it; "
            "needed where prefill is separate"
        },
    )
    grammar_timeout_s: float = field(
        default=RequestBounds.grammar_timeout_s,
        metadata={"help": "how long a grammar may compute, to be compiled, before its request fails"},
    )
    prefill_batch: int = field(
        default=4, metadata={"help": "prefill jobs that a worker in the prefill role computes at once"}
    )

    def __post_init__(self) -> None:
        if self.prefill_batch < 1:
            raise ValueError(f"prefill-batch must be at least 1, not {self.prefill_batch}")
        if self.grammar_timeout_s <= 0:
            raise ValueError(f"grammar-timeout-s must be positive, not {self.grammar_timeout_s:g}")


def worker_schema() -> SchemaTable:
    """All keys that a worker takes."""
    own = (schema_of(settings) for settings in (WorkerSettings, MockerSettings, NeighbourSettings))
    return combine(*own, engine_schema(), adapter_schema())


def preload_of(config: Mapping[str, Any]) -> str | None:
    """The module that the fork server imports before a worker with this configuration starts."""
    return VLLM_PRELOAD if config.get("engine", WorkerSettings.engine) == "vllm" else None


def devices_of(config: Mapping[str, Any]) -> DeviceUse:
    """How a worker with this configuration uses its devices: vLLM runs a rank on each, the mocker uses none."""
    if config.get("engine", WorkerSettings.engine) == "mocker":
        return DeviceUse(virtual=True)
    return DeviceUse(ranks=ranks_of(config))


def make_engine(context: ServiceContext) -> Engine:
    """The engine that the configuration names, not started yet."""
    if context.settings(WorkerSettings).engine == "mocker":
        from dynamo_local.engine.mocker.engine import MockerEngine

        return MockerEngine(context.settings(MockerSettings), context.private_dir)
    from dynamo_local.engine.vllm.engine import VllmEngine

    settings = context.settings(WorkerSettings)
    return VllmEngine(
        context.config,
        context.private_dir,
        kv_transfer=settings.kv_transfer,
        grammar_timeout_s=settings.grammar_timeout_s,
        tasks=context.tasks,
    )
