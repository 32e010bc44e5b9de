"""What is asked of the machine before workers of endpoints start or wake."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from state.devices.allocation import Inventory
from state.devices.gone import gone_devices
from state.machine.memory import Memory, machine_memory


@dataclass(frozen=True)
class MachineFacts:
    """Where the facts come from. By default from this machine.

    `gone`: devices that are not there any more, by id, each with the reason. `memory`: of the machine, None if it is
    not known. Both block.
    """

    gone: Callable[[Inventory], Mapping[int, str]] = gone_devices
    memory: Callable[[], Memory | None] = machine_memory


THIS_MACHINE = MachineFacts()
