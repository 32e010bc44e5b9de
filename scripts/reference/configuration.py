"""The page on configuration: keys of the services of the example graphs, live settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import msgspec

from dynamo_local.core.live_settings import SETTINGS
from dynamo_local.engine.vllm.arguments import engine_schema, server_schema
from dynamo_local.sdk.config.schema import ConfigSchema, KeySpec, agreed_in, canonical, schema_of, settings_of
from dynamo_local.sdk.config.sections import ARGS, SERVICE_ARGS, TAKEN
from dynamo_local.sdk.graph import load_graph
from dynamo_local.sdk.resources import Resources
from dynamo_local.sdk.service import ServiceSpec, spec_of
from scripts.reference import markdown

GRAPHS = (
    "examples.llm.graphs.disagg:Frontend",
    "examples.llm.graphs.agg:Frontend",
    "examples.llm.graphs.agg_router:Frontend",
    "examples.hello_world.hello_world:Frontend",
)
_KEYS = ("key", "type", "default", "meaning")

_INTRODUCTION = """
A configuration is a YAML file (`dynamo serve --file`) with a section for each service of the graph. A key of a section
can also be given on the command line, as `--SERVICE.KEY=VALUE`. Keys are spelled with hyphens; underscores mean the
same. A key or value that is not allowed is refused before anything is started. Environment variables, and what takes
precedence over what: [environment](environment.md).
"""
_COMMON = """
`Common` is a section for keys that several services share. It may contain every key of the services below. A service
takes those that its `common-configs` lists.
"""
_AGREED = """
All services of a graph must agree on some keys. Given to one service, or in `Common`, they count for all services that
have them:
"""
_VLLM = """
Frontend and workers take vLLM's arguments as keys. The name of a key is the name of the argument of `vllm serve`
without its dashes, so `max-num-seqs: 64` stands for `--max-num-seqs 64`. `true` and `false` switch a flag on and off
(`--enforce-eager` and `--no-enforce-eager`), `null` leaves vLLM's default. Arguments with several values are lists, and
arguments in JSON are mappings. [Options of vllm serve](vllm-options.md) says which ones are refused, and who reads the
others.
"""
_LIVE = """
`dynamo config set` changes these settings until the server ends. At the start of the server, the keys of the frontend
with the same names apply.
"""


def page() -> str:
    """The text of docs/reference/configuration.md."""
    parts = [_INTRODUCTION, *_every_service(), *_common(), *_services(), *_vllm(), *_live()]
    return markdown.page("Configuration", map(markdown.part, parts))


def specs() -> list[tuple[str, ServiceSpec]]:
    """The services of the example graphs, each with its example's folder. The root of a graph comes first."""
    found: dict[type, str] = {}
    for target in GRAPHS:
        folder = "/".join(target.split(".")[:2])
        found.update({cls: folder for cls in reversed(load_graph(target).services) if cls not in found})
    return [(folder, spec_of(cls)) for cls, folder in found.items()]


def own_keys(schema: ConfigSchema) -> dict[str, KeySpec]:
    """The keys of a service without vLLM's arguments."""
    foreign = {*engine_schema().keys(), *server_schema().keys()}
    return {name: key for name, key in schema.keys().items() if name not in foreign}


def _every_service() -> Iterator[str]:
    yield "## Every service"
    keys = {TAKEN.name: TAKEN}
    for name, key in SERVICE_ARGS.keys().items():
        keys |= _resources(f"{ARGS}.{name}") if name == "resources" else {f"{ARGS}.{name}": key}
    yield _key_table(keys)


def _resources(prefix: str) -> dict[str, KeySpec]:
    """The keys of a worker's resources, without defaults: those are the service's own."""
    keys = schema_of(Resources).keys().items()
    return {f"{prefix}.{name}": msgspec.structs.replace(key, default=None) for name, key in keys}


def _common() -> Iterator[str]:
    yield "## Common"
    yield _COMMON
    agreed: dict[str, str] = {}
    for _, spec in specs():
        agreed.update(agreed_in(spec.schema))
    yield f"{_AGREED} {markdown.codes(sorted(name for name, other in agreed.items() if name == other))}."
    parts = [(markdown.code(name), markdown.code(other)) for name, other in sorted(agreed.items()) if name != other]
    yield markdown.table(("part of a key", "must agree with"), parts)


def _services() -> Iterator[str]:
    by_folder: dict[str, dict[tuple[str, ...], list[ServiceSpec]]] = {}
    for folder, spec in specs():
        by_folder.setdefault(folder, {}).setdefault(tuple(spec.schema.keys()), []).append(spec)
    for folder, by_keys in by_folder.items():
        yield f"## Services of {folder}"
        for alike in by_keys.values():
            yield f"### {' and '.join(spec.name for spec in alike)}"
            yield from _service(alike[0])


def _service(spec: ServiceSpec) -> Iterator[str]:
    own = own_keys(spec.schema)
    yield _key_table(own, _metadata(settings_of(spec.schema))) if own else "No keys of its own."
    if set(server_schema().keys()) <= set(spec.schema.keys()):
        yield "It also takes the arguments of vLLM's engine and of vLLM's OpenAI server."
    elif set(engine_schema().keys()) <= set(spec.schema.keys()):
        yield "It also takes the arguments of vLLM's engine."


def _vllm() -> Iterator[str]:
    yield "## Arguments of vLLM"
    yield _VLLM


def _live() -> Iterator[str]:
    yield "## Live settings"
    yield _LIVE
    rows = [
        (
            markdown.code(each.name),
            f"int{markdown.bounds(each.minimum, None, each.maximum)}",
            markdown.code(each.default),
            each.help,
        )
        for each in SETTINGS.values()
    ]
    yield markdown.table(_KEYS, rows)


def _key_table(keys: Mapping[str, KeySpec], metadata: Mapping[str, Mapping[str, Any]] | None = None) -> str:
    about = metadata or {}
    rows = [
        (markdown.code(name), _type(key, about.get(name, {})), _default(key), key.help) for name, key in keys.items()
    ]
    return markdown.table(_KEYS, rows)


def _metadata(settings: Iterable[type]) -> dict[str, Mapping[str, Any]]:
    """The metadata of fields of settings, by key."""
    return {canonical(field.name): field.metadata for kind in settings for field in fields(kind)}


def _type(key: KeySpec, metadata: Mapping[str, Any]) -> str:
    kind = f"one of {markdown.codes(key.choices)}" if key.choices else key.kind
    limits = markdown.bounds(*(metadata.get(name) for name in ("at_least", "above", "at_most")))
    return f"{kind}{limits}{' or null' if key.optional else ''}"


def _default(key: KeySpec) -> str:
    if key.required:
        return "required"
    return "" if key.default is None or key.default == "" else markdown.code(key.default)
