"""Devices of this machine that other servers hold, as a running server sees them."""

from __future__ import annotations

from dynamo_local.supervisor.server.launch.blueprint import Blueprint
from state.devices.holding import held_elsewhere
from state.statefile.model import State
from state.statefile.transitions import taken


def held_by_others(blueprint: Blueprint, state: State) -> dict[int, str]:
    """Devices that others hold, each with its holder; empty if all workers are virtual. Blocks as `held_elsewhere`."""
    if all(template.virtual for template in blueprint.workers):
        return {}
    found = held_elsewhere(blueprint.inventory, state.owner.pid, taken(state))
    return {device_id: str(holder) for device_id, holder in found.items()}
