"""Output of `dynamo serve --dry-run`: the resolved graph, its watchers, devices and configuration."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo_local.cli.output.console import table
from dynamo_local.core.shares import shown_devices
from dynamo_local.sdk.config.redaction import redact, shown

if TYPE_CHECKING:
    from dynamo_local.core.endpoints.spec import EndpointSpec
    from dynamo_local.sdk.config.resolved import ResolvedService
    from dynamo_local.supervisor.server.launch.launch import Launch
    from dynamo_local.supervisor.server.launch.templates import WatcherPlan

_OF_ENDPOINTS = ("ENDPOINT", "MODEL", "WORKERS", "DEVICES EACH", "ARGUMENTS")


def as_json(launch: Launch, endpoints: Sequence[EndpointSpec] = ()) -> str:
    """Return the plan as JSON, with secrets masked. `endpoints`: those that the server would serve."""
    plan = {
        "namespace": launch.graph.namespace,
        "http": launch.http.url,
        "bus": _bus(launch),
        "device_kind": launch.inventory.kind,
        "devices": {str(device.id): device.name for device in launch.inventory.devices},
        "watchers": [_watcher(watcher) for watcher in launch.services],
        "graph": launch.graph.redacted(),
        "endpoints": [redact("", msgspec.to_builtins(spec)) for spec in endpoints],
    }
    return msgspec.json.format(msgspec.json.encode(plan), indent=2).decode()


def as_text(launch: Launch, endpoints: Sequence[EndpointSpec] = ()) -> str:
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
    from dynamo_local.cli.endpoints.text import bounds_of, model_of

    args = ", ".join(f"{key}={shown(key, value)}" for key, value in spec.args.items())
    return spec.name, model_of(spec), bounds_of(spec), "-" if spec.gpu is None else f"{spec.gpu:g}", args or "-"


def _watcher(plan: WatcherPlan) -> dict[str, Any]:
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
