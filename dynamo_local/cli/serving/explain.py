"""Output of `dynamo serve --explain`: what was chosen, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo_local.cli.output.console import table
from dynamo_local.cli.serving.choosing import Decided
from dynamo_local.core.sizing.machine import size
from dynamo_local.supervisor.server.launch.launch import Launch


def as_json(model: str, launch: Launch, decided: Sequence[Decided]) -> str:
    """Return the decisions as JSON."""
    document = {
        "model": model,
        "served_as": _served(launch),
        "graph": launch.graph.target,
        "workers": {service.name: service.workers for service in launch.graph.services if service.gpu},
        "device_kind": launch.inventory.kind,
        "devices": {str(device.id): device.name for device in launch.inventory.devices},
        "chosen": [
            {"setting": one.setting, "value": one.value, "services": one.services, "reason": one.reason}
            for one in decided
        ],
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def as_text(model: str, launch: Launch, decided: Sequence[Decided]) -> str:
    """Return the decisions as text: a table, and what was left open."""
    workers = ", ".join(f"{service.workers} {service.name}" for service in launch.graph.services if service.gpu)
    devices = ", ".join(device.name for device in launch.inventory.devices)
    names = _served(launch)
    served = f", served as {', '.join(names)}" if names else ""
    head = f"model      {model}{served}\ngraph      {launch.graph.target}: {workers}\ndevices    {devices}"
    rows = [(one.setting, _shown(one), ", ".join(one.services) or "-", one.reason) for one in decided]
    if not rows:
        return f"{head}\n\nNothing was chosen: everything is given."
    return f"{head}\n\n{table(('SETTING', 'VALUE', 'FOR', 'WHY'), rows)}"


def _served(launch: Launch) -> list[str]:
    """The names that clients use; empty where vLLM takes the model's own."""
    return list(launch.graph.root.config.get("served-model-name") or ())


def _shown(one: Decided) -> str:
    value: Any = one.value
    if value is None:
        return "none"
    if one.setting.endswith("-bytes"):
        return size(value)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
