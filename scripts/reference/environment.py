"""The page on environment variables: what goes before what, and what becomes of each variable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from dynamo_local.engine.vllm.arguments import REFUSED_VARIABLES
from dynamo_local.engine.vllm.environment import IMPORT_DEFAULTS
from scripts.reference import markdown
from scripts.reference.variables import variables
from scripts.reference.vllm_variables import HARMLESS, OURS, TAKEN

_INTRODUCTION = """
What a setting comes from when several places give it, and what becomes of each environment variable of this project, of
vLLM and of the libraries in between. Keys of services: [configuration](configuration.md).
"""
_ORDER = (
    (
        "a key of a service",
        "`--SERVICE.KEY=VALUE`; an option without a service (`--max-model-len`, `--workers`), and then one in a file "
        "for `--config`; `--Common.KEY=VALUE` and `--model`; the service's section of the file (`-f`); `Common` of the "
        "file; what is chosen for the model and the machine; the service's default; vLLM's default",
    ),
    (
        "a key of an endpoint",
        "a service's section of its `args`; its `args`; `--kv-network` and `--kv-stream` of the server; what is chosen "
        "for its model; the defaults",
    ),
    (
        "a live setting",
        "`dynamo config set`, until the server ends; the frontend's key of the same name",
    ),
    (
        "an option with a variable",
        "the option: `--cpu-slots` before `DYN_CPU_SLOTS`, `--namespace` before `DYN_NAMESPACE`, `--nats-url` before "
        "`NATS_SERVER`, `--nats-ca` before `NATS_CA`, `--api-key-file` before `DYN_API_KEY` before `OPENAI_API_KEY`",
    ),
    (
        "a variable of a service's processes",
        "what the server sets itself; `ServiceArgs.envs`; the environment of `dynamo serve`, or of the node on which "
        "the process runs; this project's default; vLLM's default",
    ),
    (
        "a key and a variable of vLLM's, or of a library's, for one thing",
        "the key: `hf-token`, `download-dir`, `otlp-traces-endpoint`. On CPUs `VLLM_CPU_KVCACHE_SPACE` goes before "
        "`kv-cache-memory-bytes`. Of two bounds the smaller one holds",
    ),
)
_REFUSED = """
These would open, close or change something behind the gate, where the server's own keys, limits and stores do not hold.
`dynamo serve` does not start where one is set to a value that changes something, whatever it is to serve; nor is one
taken in `ServiceArgs.envs`, of a graph or of an endpoint. A process on a node of a cluster refuses what its node has
set.
"""
_DEFAULTS = """
Processes that use vLLM set these variables before they import it, unless they are set in the environment or in
`ServiceArgs.envs`:
"""
_OF_OTHERS = {
    "FORWARDED_ALLOW_IPS": "proxies whose X-Forwarded-For uvicorn believes, by default those of this machine; "
    "with `*` every client can say that it is on this machine, to which `x-dynamo-route` is shown",
    "WEB_CONCURRENCY, UVICORN_*": "uvicorn's: without effect; --frontends is the number of frontends",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "OpenTelemetry's: engines send spans of their start there; "
    "`otlp-traces-endpoint` goes before it",
    "OTEL_*": "OpenTelemetry's: taken where traces are sent; OTEL_SDK_DISABLED=true sends none",
    "HF_TOKEN, HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_HUB_OFFLINE": "the hub's: taken. The keys `hf-token` and "
    "`download-dir` go before them",
    "HTTP_PROXY, HTTPS_PROXY, NO_PROXY": "taken where models are fetched",
    "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, UCX_*": "interfaces on which ranks and KV transfer listen, without "
    "authentication: [security](../security.md)",
    "EXA_API_KEY": "vLLM's key of a search engine, where `tool-server` has it search",
    "PYTHONHASHSEED": "changes the names of cached blocks: workers with different ones read no KV from each other",
}
_OTHERS = """
Those that open or close something, or are often set. Handlers of Amazon SageMaker and folders of Prometheus are
[refused](#refused).
"""


def page(root: Path) -> str:
    """The text of docs/reference/environment.md."""
    return markdown.page("Environment", map(markdown.part, (_INTRODUCTION, *_order(), *_own(root), *_of_vllm())))


def _order() -> Iterator[str]:
    yield "## What goes before what"
    yield "What stands first holds."
    yield markdown.table(("setting", "order"), _ORDER)


def _own(root: Path) -> Iterator[str]:
    found = variables(root)
    yield "## Variables of this project"
    yield "Variables that you can set:"
    yield _table("meaning", {each.name: each.help for each in found if not each.is_internal})
    yield "Variables that the server sets in its own processes. Do not set them:"
    yield _table("meaning", {each.name: each.help for each in found if each.is_internal})
    yield _DEFAULTS
    yield _table("value", {name: markdown.code(value) for name, value in sorted(IMPORT_DEFAULTS.items())})


def _of_vllm() -> Iterator[str]:
    yield "## Variables of vLLM"
    yield "### Refused"
    yield _REFUSED
    yield _table("instead", {name: variable.remedy for name, variable in REFUSED_VARIABLES.items()})
    yield "### Honoured in this project's own way"
    yield _table("what it does", OURS)
    yield "### Taken as vLLM takes them"
    yield _grouped(TAKEN)
    yield "### Without effect"
    yield _grouped(HARMLESS)
    yield "## Variables of other libraries"
    yield _OTHERS
    yield _table("what it does", _OF_OTHERS)


def _grouped(groups: Mapping[str, str]) -> str:
    return markdown.table(
        ("what for", "variables"), [(about, markdown.codes(names.split())) for about, names in groups.items()]
    )


def _table(heading: str, rows: Mapping[str, str]) -> str:
    return markdown.table(
        ("variable", heading), [(markdown.codes(names.split(", ")), text) for names, text in rows.items()]
    )
