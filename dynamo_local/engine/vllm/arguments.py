"""vLLM's settings as configuration keys, known without importing vLLM (which takes many seconds).

`arguments.json` is written by describe.py from the vLLM that the project pins; a contract test compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import msgspec

from dynamo_local.engine.vllm.adapters import AdapterSettings
from dynamo_local.sdk.schema import KeySpec, SchemaTable

MANAGED = frozenset(
    {
        # Fixed by this project: where to listen, what stands behind the server, how many processes there are.
        "api-server-count", "config", "data-parallel-supervisor-port", "device-ids", "enable-fault-tolerance",
        "enable-server-load-tracking", "grpc", "grpc-port", "headless", "host", "middleware", "port", "uds",
        "dp-supervisor-probe-failure-threshold", "dp-supervisor-probe-interval-s", "dp-supervisor-probe-timeout-s",
        # A secret does not belong in a configuration: see the frontend's api-key-file.
        "api-key",
    }
)  # fmt: skip
"""Arguments of `vllm serve` that are not settings here."""

_ADAPTERS = KeySpec("lora-modules", "list", optional=True, help="LoRA adapters, each as name=path; with enable-lora")


_SIZES = ("tensor-parallel-size", "pipeline-parallel-size", "prefill-context-parallel-size", "data-parallel-size")

SPLIT = frozenset(
    {
        *_SIZES, "data-parallel-external-lb", "data-parallel-hybrid-lb", "data-parallel-rank",
        "data-parallel-size-local", "data-parallel-start-rank", "decode-context-parallel-size",
        "distributed-executor-backend", "nnodes", "node-rank",
    }
)  # fmt: skip
"""Arguments that say among which processes a model is split."""


class _Described(msgspec.Struct, frozen=True):
    vllm: str
    engine: list[KeySpec]
    server: list[KeySpec]


@cache
def _described() -> _Described:
    data = resources.files(__package__).joinpath("arguments.json").read_bytes()
    return msgspec.json.decode(data, type=_Described)


def engine_schema() -> SchemaTable:
    """Keys of `AsyncEngineArgs`: what a worker and a frontend both take."""
    return _table(_described().engine)


def server_schema() -> SchemaTable:
    """Keys of vLLM's OpenAI server alone: chat templates, tools, TLS, logging."""
    return _table(_described().server)


def adapter_schema() -> SchemaTable:
    """The key that names LoRA adapters. vLLM's server takes it, and here workers do as well: they go by no other."""
    return SchemaTable({_ADAPTERS.name: _ADAPTERS}, (AdapterSettings,))


def _table(specs: list[KeySpec]) -> SchemaTable:
    return SchemaTable.of(*(spec for spec in specs if spec.name not in (*MANAGED, _ADAPTERS.name)))


def ranks_of(config: Mapping[str, Any]) -> int:
    """Among how many devices an engine with this configuration splits its model, or has copies of it."""
    return math.prod(config.get(size) or 1 for size in _SIZES)


def unsplit(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a process that has no engine: vLLM would look for the devices of all ranks."""
    return {key: value for key, value in config.items() if key not in SPLIT}


def to_argv(config: dict[str, Any], allowed: SchemaTable) -> list[str]:
    """The configuration as vLLM's own command line, for its parser to convert and check. Other keys are left out."""
    argv: list[str] = []
    for key, value in config.items():
        spec = allowed.keys().get(key)
        if spec is None or value is None:
            continue
        if spec.kind == "bool":
            argv.append(f"--{key}" if value else f"--no-{key}")
        elif isinstance(value, list) and spec.kind == "list":
            argv.extend([f"--{key}", *map(_text, value)])
        else:
            # One word, so that a value beginning with a dash is not taken for an option.
            argv.append(f"--{key}={_text(value)}")
    return argv


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode() if isinstance(value, dict | list | bool) else str(value)
