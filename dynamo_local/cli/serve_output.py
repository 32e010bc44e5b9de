"""Output of `dynamo serve`: of --dry-run, --explain and --help-engine, which start nothing, and what it says before it
starts."""

from __future__ import annotations

import os
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec

from dynamo_local.cli.output import Console, table
from dynamo_local.core.errors import UsageError
from dynamo_local.core.fleet.view import AGGREGATED_ROLE
from dynamo_local.core.shares import shown_devices
from dynamo_local.core.sizing.machine import Choice, counted, size
from dynamo_local.core.sizing.parsers import PARSER_KEYS, TOOL_PARSER
from dynamo_local.core.suggestions import suggest
from dynamo_local.engine.vllm.arguments import VllmKey, described_vllm, every_argument
from dynamo_local.engine.vllm.command_line import REFUSED
from dynamo_local.sdk.config.resolved import redact, shown
from dynamo_local.supervisor.server.launch.choosing import CPU_SLOTS, MAX_LEN
from dynamo_local.supervisor.server.launch.models import ModelSource
from dynamo_local.supervisor.server.launch.plan import HttpAddress, Launch
from dynamo_local.supervisor.server.launch.prepare import prepare, registry_of
from dynamo_local.supervisor.server.launch.request import ServeRequest
from dynamo_local.supervisor.upkeep.devices import beside
from state.devices.holding import held_elsewhere

if TYPE_CHECKING:
    from dynamo_local.core.endpoints.spec import EndpointSpec
    from dynamo_local.sdk.config.resolved import ResolvedService
    from dynamo_local.supervisor.server.launch.templates import WatcherPlan

_OF_ENDPOINTS = ("ENDPOINT", "MODEL", "WORKERS", "DEVICES EACH", "ARGUMENTS")

_WIDTH = 100
_INDENT = " " * 6
_TITLES = {"options": "General"}


def described(request: ServeRequest, http: HttpAddress, *, explain: bool, as_json: bool) -> str:
    """The text of --explain, or else of --dry-run. Raises UsageError for what could not be started."""
    if explain and request.of_endpoints:
        raise UsageError("--explain shows what is chosen for a model, and none is named", "use --dry-run")
    looks = explain or request.graph is None or request.of_endpoints
    models = ModelSource(Console(err=True), fetches_weights=False) if looks else None
    launch = prepare(request, http, os.environ, models)
    if explain:
        text = choices_as_json if as_json else choices_as_text
        return text(request.model or launch.graph.target, launch)
    for line in (*_notes(launch), *(_chosen_lines(request, launch) if request.of_endpoints else [])):
        click.echo(line, err=True)
    launch = beside(launch, held_elsewhere(launch.inventory, os.getpid()))
    endpoints = registry_of(launch.paths, launch.endpoints, forget=launch.forget).entries.values()
    specs = [entry.spec for entry in endpoints]
    return plan_as_json(launch, specs) if as_json else plan_as_text(launch, specs)


def lines_of_start(request: ServeRequest, launch: Launch) -> list[str]:
    """What is said of a server that is about to start."""
    return [*_notes(launch), *_chosen_lines(request, launch)]


def _notes(launch: Launch) -> list[str]:
    return [f"note: {note}" for note in launch.graph.notes]


def _chosen_lines(request: ServeRequest, launch: Launch) -> list[str]:
    """At most two lines about what was chosen."""
    if request.of_endpoints:
        slots = [one for one in launch.chosen if one.key == CPU_SLOTS]
        return [f"{one.value} CPU slots, {one.reason} (--cpu-slots N: another number)" for one in slots]
    lines = []
    if request.graph is None:
        workers = [service for service in launch.graph.services if service.gpu]
        said = ", ".join(counted(service.workers, _kind(service.role)) for service in workers)
        lines.append(f"{request.model}: {said}, {_summary(launch.chosen)} (--explain: why)".replace(", (", " ("))
    parsers = _parsers_line(launch.chosen)
    return [*lines, parsers] if parsers else lines


def _kind(role: str) -> str:
    return "worker" if role == AGGREGATED_ROLE else f"{role} worker"


def _summary(chosen: Sequence[Choice]) -> str:
    """What was chosen, for one line: the settings that users ask about most."""
    values = {one.key: one.value for one in chosen if one.value is not None}
    parts = [
        f"context {values[MAX_LEN]} tokens" if MAX_LEN in values else "",
        f"KV cache {size(values['kv-cache-memory-bytes'])} for each worker"
        if "kv-cache-memory-bytes" in values
        else "",
        f"{values['tensor-parallel-size']} GPUs for each worker" if values.get("tensor-parallel-size", 1) > 1 else "",
        str(values.get("dtype", "")),
    ]
    return ", ".join(part for part in parts if part)


def _parsers_line(chosen: Sequence[Choice]) -> str:
    """What was chosen for tools and reasoning, for one line. Empty if nothing had to be."""
    found = {one.key: one for one in chosen if one.key in PARSER_KEYS}
    tools, reasoning = found.get(TOOL_PARSER), found.get("reasoning-parser")
    parts = []
    if tools is not None:
        parts.append(f"tools: {tools.value or f'off, {tools.reason}'}")
    if reasoning is not None and reasoning.value is not None:
        parts.append(f"reasoning: {reasoning.value}")
    return "; ".join(parts)


def plan_as_json(launch: Launch, endpoints: Sequence[EndpointSpec] = ()) -> str:
    """Return the plan as JSON, with secrets masked. `endpoints`: those that the server would serve."""
    plan = {
        "namespace": launch.graph.namespace,
        "http": launch.http.url,
        "bus": _bus(launch),
        "device_kind": launch.inventory.kind,
        "devices": {str(device.id): device.name for device in launch.inventory.devices},
        "watchers": [_planned_watcher(watcher) for watcher in launch.services],
        "graph": launch.graph.redacted(),
        "endpoints": [redact("", msgspec.to_builtins(spec)) for spec in endpoints],
    }
    return msgspec.json.format(msgspec.json.encode(plan), indent=2).decode()


def plan_as_text(launch: Launch, endpoints: Sequence[EndpointSpec] = ()) -> str:
    """Return the plan as text, with secrets masked."""
    graph = launch.graph.redacted()
    watchers = [_watcher_cells(watcher) for watcher in launch.services]
    configuration = [cells for service in graph.services for cells in _configuration(service)]
    parts = [
        f"graph      {graph.target} in namespace {graph.namespace}\n"
        f"API        {launch.http.url}\n"
        f"NATS       {_bus(launch)}\n"
        f"devices    {len(launch.inventory.devices)} of kind {launch.inventory.kind}",
        table(("WATCHER", "ROLE", "DEVICES", "COMMAND"), watchers),
    ]
    if endpoints:
        parts.append(table(_OF_ENDPOINTS, [_endpoint(spec) for spec in endpoints]))
    if configuration:
        parts.append(table(("SERVICE", "KEY", "VALUE"), configuration))
    return "\n\n".join(parts)


def _bus(launch: Launch) -> str:
    return "started with the graph" if launch.bus is None else launch.bus.shown


def _endpoint(spec: EndpointSpec) -> tuple[str, ...]:
    from dynamo_local.cli.endpoint_text import bounds_of, model_of

    args = ", ".join(f"{key}={shown(key, value)}" for key, value in spec.args.items())
    return spec.name, model_of(spec), bounds_of(spec), "-" if spec.gpu is None else f"{spec.gpu:g}", args or "-"


def _planned_watcher(plan: WatcherPlan) -> dict[str, Any]:
    return {
        "watcher": plan.name,
        "component": plan.watcher.service,
        "role": plan.role,
        "devices": plan.devices,
        "share": plan.share,
        "cmd": shlex.join(plan.argv),
        "environment": {name: redact(name, value) for name, value in sorted(plan.environment.items())},
    }


def _watcher_cells(plan: WatcherPlan) -> tuple[str, ...]:
    return plan.name, plan.role, shown_devices(plan.devices, plan.share) or "-", shlex.join(plan.argv)


def _configuration(service: ResolvedService) -> Iterator[tuple[str, str, str]]:
    arguments: dict[str, float] = {"workers": service.workers, "gpu": service.gpu, "cpu": service.cpu}
    for key, number in arguments.items():
        yield service.name, f"ServiceArgs.{key}", f"{number:g}"
    for name, value in service.envs.items():
        yield service.name, f"ServiceArgs.envs.{name}", shown(name, value)
    for key, value in service.config.items():
        yield service.name, key, shown(key, value)


def choices_as_json(model: str, launch: Launch) -> str:
    """Return the decisions as JSON."""
    document = {
        "model": model,
        "served_as": _served(launch),
        "graph": launch.graph.target,
        "workers": {service.name: service.workers for service in launch.graph.services if service.gpu},
        "device_kind": launch.inventory.kind,
        "devices": {str(device.id): device.name for device in launch.inventory.devices},
        "chosen": [
            {"setting": one.key, "value": one.value, "services": one.services, "reason": one.reason}
            for one in launch.chosen
        ],
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def choices_as_text(model: str, launch: Launch) -> str:
    """Return the decisions as text: a table, and what was left open."""
    workers = ", ".join(f"{service.workers} {service.name}" for service in launch.graph.services if service.gpu)
    devices = ", ".join(device.name for device in launch.inventory.devices)
    names = _served(launch)
    served = f", served as {', '.join(names)}" if names else ""
    head = f"model      {model}{served}\ngraph      {launch.graph.target}: {workers}\ndevices    {devices}"
    rows = [(one.key, _shown_value(one), ", ".join(one.services) or "-", one.reason) for one in launch.chosen]
    if not rows:
        return f"{head}\n\nNothing was chosen: everything is given."
    return f"{head}\n\n{table(('SETTING', 'VALUE', 'FOR', 'WHY'), rows)}"


def _served(launch: Launch) -> list[str]:
    """The names that clients use; empty where vLLM takes the model's own."""
    return list(launch.graph.root.config.get("served-model-name") or ())


def _shown_value(one: Choice) -> str:
    value: Any = one.value
    if value is None:
        return "none"
    if one.key.endswith("-bytes"):
        return size(value)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def engine_help(pattern: str) -> str:
    """The options whose group, name or help has the pattern, in any case; "" is all. Raises UsageError for none."""
    arguments = every_argument()
    groups: dict[str, list[VllmKey]] = {}
    for argument in arguments.values():
        groups.setdefault(_TITLES.get(argument.group, argument.group), []).append(argument)
    wanted = pattern.lower().replace("_", "-").lstrip("-")
    named = {title: keys for title, keys in groups.items() if wanted in (title.lower(), _short(title))}
    found = named or {title: [key for key in keys if _matches(key, wanted)] for title, keys in groups.items()}
    if not any(found.values()):
        raise UsageError(f"no option of vLLM has {pattern!r}", suggest(pattern, groups, "its groups are"))
    head = f"Options of vLLM {described_vllm()}, as `dynamo serve` takes them. Groups: {', '.join(sorted(groups))}."
    parts = [textwrap.fill(head, _WIDTH)]
    for title in sorted(found):
        if found[title]:
            parts.append("\n".join([f"{title}:", *(line for key in found[title] for line in _option_lines(key))]))
    return "\n\n".join(parts)


def _short(title: str) -> str:
    """A group as people name it: "cache" for "CacheConfig"."""
    return title.lower().removesuffix("config")


def _matches(key: VllmKey, wanted: str) -> bool:
    return wanted in key.name or wanted in key.help.lower()


def _option_lines(key: VllmKey) -> Iterator[str]:
    names = ", ".join((*key.aliases, f"--{key.name}"))
    yield f"  {names}{_option_value(key)}"
    if key.name in REFUSED:
        yield from _filled(f"Not taken: {REFUSED[key.name]}.")
        return
    said = [f"{key.help}."] if key.help and not key.help.startswith("API docs") else []
    if key.default not in (None, "") and key.kind != "bool":
        said.append(f"[default: {key.default}]")
    if said:
        yield from _filled(" ".join(said))


def _option_value(key: VllmKey) -> str:
    if key.kind == "bool":
        return f", --no-{key.name}"
    if key.choices:
        return f" {{{','.join(map(str, key.choices))}}}"
    return {"list": " ITEM...", "dict": " JSON", "int": " N", "float": " X"}.get(key.kind, " VALUE")


def _filled(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
