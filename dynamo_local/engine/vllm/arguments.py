"""vLLM's settings as configuration keys, known without importing vLLM (which takes many seconds).

`arguments.json` is written by scripts/describe_vllm.py from the vLLM that the project pins; a contract test compares
the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

import msgspec

from dynamo_local.engine.vllm.settings import AdapterSettings
from dynamo_local.sdk.config.schema import KeySpec, RefusedVariable, SchemaTable

_LISTENING = "use --host and --port of `dynamo serve`"
_PROCESSES = "use ServiceArgs and `dynamo scale` for processes and devices"
_ONE_PROTOCOL = "leave it out: only HTTP is served"
_HEADS = "use max-header-bytes and max-headers"
_UNTOLD = "leave it out: clients get tokens and log-probabilities only"
_TEXT_ALONE = "leave it out: prompts are text or tokens, and others are refused"
_CLOSED = "leave it out: the paths that it is for are closed"
_UNREAD = "leave it out: nothing in vLLM acts on it"
_ENGINES_STATISTICS = "leave it out: of engines there are dynamo_worker_* at /metrics"

_MEDIA = (
    "allowed-local-media-path", "allowed-media-domains", "default-mm-loras", "enable-mm-embeds",
    "enable-prompt-embeds", "interleave-mm-strings", "media-io-kwargs", "mm-hasher-algorithm",
    "mm-processor-cache-gb", "mm-processor-cache-type", "mm-shm-cache-max-object-size-mb",
    "trust-request-mm-kwargs",
)  # fmt: skip
"""Arguments about what a prompt holds beside text. Those that change what an engine loads are settings."""

MANAGED: Mapping[str, str] = MappingProxyType(
    {
        "host": _LISTENING,
        "port": _LISTENING,
        "uds": _LISTENING,
        "api-server-count": _PROCESSES,
        "data-parallel-supervisor-port": _PROCESSES,
        "device-ids": _PROCESSES,
        "dp-supervisor-probe-failure-threshold": _PROCESSES,
        "dp-supervisor-probe-interval-s": _PROCESSES,
        "dp-supervisor-probe-timeout-s": _PROCESSES,
        "headless": _PROCESSES,
        "grpc": _ONE_PROTOCOL,
        "grpc-port": _ONE_PROTOCOL,
        "h11-max-header-count": _HEADS,
        "h11-max-incomplete-event-size": _HEADS,
        "config": "use --file of `dynamo serve`",
        "enable-flash-late-interaction": "leave it out: these scores are computed in the frontend",
        "enable-fault-tolerance": "leave it out: requests are recovered from lost workers anyway",
        "enable-server-load-tracking": "leave it out: GET /load always counts requests",
        "enable-return-routed-experts": _UNTOLD,
        "per-request-spec-decode-metrics": _UNTOLD,
        "return-sampling-mask": _UNTOLD,
        **dict.fromkeys(_MEDIA, _TEXT_ALONE),
        **dict.fromkeys(("cohere-is-reasoning-model", "enable-scale-out", "tokens-only"), _CLOSED),
        **dict.fromkeys(("enable-elastic-ep", "elastic-ep-max-dp-size"), _PROCESSES),
        **dict.fromkeys(("cudagraph-metrics", "enable-mfu-metrics", "kv-cache-metrics"), _ENGINES_STATISTICS),
        "kv-cache-metrics-sample": _ENGINES_STATISTICS,
        **dict.fromkeys(("collect-detailed-traces", "disable-cascade-attn", "max-parallel-loading-workers"), _UNREAD),
        "aggregate-engine-logging": "leave it out: each worker has a log of its own (dynamo logs)",
        "enable-sleep-mode": "use `dynamo endpoint park`, or sleep-after-s: workers sleep without it",
        "enable-tokenizer-info-endpoint": "read tokenizer_config.json in the model's folder, or ask /tokenize",
        "profiler-config": "profile a worker's process from outside, with py-spy or nsys",
        "shutdown-timeout": "use drain-timeout-s of Frontend and workers",
        "weight-transfer-config": "update the endpoint's model: new workers load it, and no request fails",
        "middleware": "leave it out: requests are checked before they reach vLLM's server",
        "api-key": "use api-key-file: a configuration holds no secrets",
    }
)
"""Arguments of `vllm serve` that are not settings here, and what is to be done instead."""

_SWITCH = frozenset({"", "0", "false"})
_UNIQUE_IDS = "leave it out: two requests with one X-Request-Id would be taken for one"
_COPIES = "use --workers: each worker has a copy of the model, and the router spreads the requests"
_OWN_ADAPTERS = "use `dynamo endpoint create NAME --model PATH --adapter-of ENDPOINT`: no client names a path or a hub"
_HANDLERS = "leave it out: requests are checked before they reach vLLM's server"
_TOGETHER = "leave it out: /metrics shows all frontends together"
_ELASTIC = "leave it out: vLLM sets it in its own processes"

_PUT_BEFORE = (
    "CUSTOM_FASTAPI_INVOCATION_HANDLER", "CUSTOM_FASTAPI_MIDDLEWARE_PRE_POST_PROCESS",
    "CUSTOM_FASTAPI_MIDDLEWARE_THROTTLE", "CUSTOM_FASTAPI_PING_HANDLER", "CUSTOM_POST_PROCESS", "CUSTOM_PRE_PROCESS",
    "CUSTOM_SCRIPT_FILENAME", "SAGEMAKER_MODEL_PATH",
)  # fmt: skip
"""Variables of the library for Amazon SageMaker, which puts code of the user's before vLLM's server."""


def _switch(remedy: str) -> RefusedVariable:
    return RefusedVariable(remedy, _SWITCH)


REFUSED_VARIABLES: Mapping[str, RefusedVariable] = MappingProxyType(
    {
        "VLLM_API_KEY": RefusedVariable(
            "unset it, and write the key into a file for --Frontend.api-key-file=FILE, or give each client a key of "
            "its own with `dynamo key create NAME`: both close every path"
        ),
        "VLLM_ENABLE_RESPONSES_API_STORE": _switch(
            "leave it out: `store` and `background` of /v1/responses work without, and what is kept survives the server"
        ),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": _switch(_OWN_ADAPTERS),
        "VLLM_LORA_RESOLVER_CACHE_DIR": RefusedVariable(_OWN_ADAPTERS),
        "VLLM_LORA_RESOLVER_HF_REPO_LIST": RefusedVariable(_OWN_ADAPTERS),
        "VLLM_SERVER_DEV_MODE": _switch(
            "leave it out: paths that change the server are closed; --log-error-stack logs where errors come from"
        ),
        "VLLM_ENABLE_COHERE_API": _switch("leave it out: /cohere/v2/chat is closed; use /v1/chat/completions"),
        "VLLM_SKIP_MODEL_NAME_VALIDATION": _switch("give the model more names with --served-model-name"),
        "VLLM_USE_RUST_FRONTEND": _switch("leave it out: vLLM's server in Python answers behind the gate"),
        "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": _switch("use --enable-log-requests and --enable-log-outputs"),
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": _switch(_UNIQUE_IDS),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": _switch("leave it out: nothing that is sent here needs pickle"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": RefusedVariable(
            "leave it out: an engine is a process of its own", frozenset({"", "1"})
        ),
        "VLLM_MODEL_REDIRECT_PATH": RefusedVariable("name the model's folder: dynamo serve FOLDER"),
        "VLLM_PORT": RefusedVariable(
            "leave it out: free ports are chosen; Kubernetes sets it for a Service named vllm, unless the pod has "
            "enableServiceLinks: false"
        ),
        "VLLM_DP_SIZE": RefusedVariable(_COPIES, frozenset({"", "1"})),
        "VLLM_DP_RANK": RefusedVariable(_COPIES, frozenset({"", "0"})),
        "VLLM_DP_RANK_LOCAL": RefusedVariable(_COPIES, frozenset({"", "0", "-1"})),
        "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH": _switch(_ELASTIC),
        "VLLM_ELASTIC_EP_DRAIN_REQUESTS": _switch(_ELASTIC),
        **dict.fromkeys(("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"), RefusedVariable(_TOGETHER)),
        **dict.fromkeys(_PUT_BEFORE, RefusedVariable(_HANDLERS)),
        "SAGEMAKER_ENABLE_STATEFUL_SESSIONS": _switch(_HANDLERS),
    }
)
"""Environment variables of vLLM, and of the libraries with which it answers, that would open, close or change something
behind the gate. `dynamo serve` refuses them at its start and in `ServiceArgs.envs`, and so does each process that uses
vLLM, on whatever machine it runs."""

_AGREED = (
    # The engine leaves its output free until the reasoning ends, and the server looks for that end.
    "reasoning-parser", "reasoning-parser-plugin", "reasoning-config",
    # Grammars are checked by the server, and compiled by the engine for its own tokenizer.
    "structured-outputs-config", "grammar-timeout-s", "tokenizer", "tokenizer-mode", "tokenizer-revision",
    # The server refuses what the engine cannot do, or would not do.
    "logits-processors", "enable-trace-replay", "watermark", "watermark-config",
    "speculative-config", "spec-method", "spec-model", "spec-tokens",
    # What the model is made into says which paths the server has.
    "runner", "convert", "pooler-config",
    # The server reads the model's own configuration: its vocabulary, its length.
    "hf-config-path", "hf-overrides", "revision", "trust-remote-code",
)  # fmt: skip
_OTHER_SPELLINGS = {
    "structured-outputs-config.reasoning_parser": "reasoning-parser",
    "structured-outputs-config.reasoning_parser_plugin": "reasoning-parser-plugin",
    "reasoning-config.reasoning_parser": "reasoning-parser",
}
AGREED: Mapping[str, str] = MappingProxyType({**{name: name for name in _AGREED}, **_OTHER_SPELLINGS})
"""Arguments on which frontend and workers must agree, each with the name under which it is compared."""

LOGGING = ("log-config-file", "log-level", "logging-config")
"""Arguments on the log of a process, which a frontend has for all models."""

OF_SERVER = frozenset(
    {
        "allow-credentials", "allowed-headers", "allowed-methods", "allowed-origins",
        "disable-access-log-for-endpoints", "disable-fastapi-docs", "disable-uvicorn-access-log",
        "enable-offline-docs", "enable-request-id-headers", "enable-ssl-refresh", "root-path", "ssl-ca-certs",
        "ssl-cert-reqs", "ssl-certfile", "ssl-ciphers", "ssl-keyfile", "uvicorn-log-level",
    }
)  # fmt: skip
"""Arguments on the HTTP server in front of all models. An endpoint cannot have its own."""

_ADAPTERS = KeySpec(
    "lora-modules", "list", optional=True, help="LoRA adapters, each as name=path. Requires enable-lora."
)


_SIZES = ("tensor-parallel-size", "pipeline-parallel-size", "prefill-context-parallel-size", "data-parallel-size")

SPLIT = frozenset(
    {
        *_SIZES, "data-parallel-external-lb", "data-parallel-hybrid-lb", "data-parallel-rank",
        "data-parallel-size-local", "data-parallel-start-rank", "decode-context-parallel-size",
        "distributed-executor-backend", "nnodes", "node-rank",
    }
)  # fmt: skip
"""Arguments that say among which processes a model is split."""


class VllmKey(KeySpec, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A key that is an argument of vLLM's."""

    group: str = ""
    """Heading under which `vllm serve --help` lists the argument, such as "ModelConfig"."""
    aliases: tuple[str, ...] = ()
    """Other spellings of the option, with their dashes: "-tp"."""


class _Described(msgspec.Struct, frozen=True):
    vllm: str
    engine: list[VllmKey]
    server: list[VllmKey]


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


def every_argument() -> dict[str, VllmKey]:
    """All arguments of `vllm serve` by name, those that are not keys here included."""
    described = _described()
    return {spec.name: spec for spec in (*described.engine, *described.server)}


def described_vllm() -> str:
    """The version of vLLM whose arguments these are."""
    return _described().vllm


def _table(specs: list[VllmKey]) -> SchemaTable:
    keys = SchemaTable.of(*(spec for spec in specs if spec.name not in (*MANAGED, _ADAPTERS.name)))
    return replace(keys, fixed=MANAGED, agreed=AGREED, variables=REFUSED_VARIABLES)


def chooses_log(config: Mapping[str, Any]) -> bool:
    """Return whether the configuration says what vLLM's log holds. Otherwise it begins at level WARNING."""
    return any(config.get(name) is not None for name in LOGGING)


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
