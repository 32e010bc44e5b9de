"""What is chosen for a model on a machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from dynamo_local.core.sizing.machine import GIB, Gpu, Machine
from dynamo_local.core.sizing.memory import TooLargeError
from dynamo_local.core.sizing.model_facts import ModelFacts
from dynamo_local.sdk import load_graph
from dynamo_local.sdk.config.configuration import resolve
from dynamo_local.supervisor.server.launch.choosing import Chooser, Chosen, machine_of
from dynamo_local.supervisor.server.launch.models import ModelSource
from state.devices.allocation import Device, Inventory, cpu_slots
from tests.unit.core.sizing.test_choosing import QWEN3_SMALL
from tests.unit.supervisor.recording import RecordingReport

SLOTS = cpu_slots(range(8), 4)
AT_START = Machine(8, 4, 64 * GIB, 32 * GIB)


class Small(ModelSource):
    """Has one model, whatever it is called."""

    def facts(
        self, config: Mapping[str, Any], *, computing: bool, on_cpu: bool, fit: Callable[[ModelFacts], None]
    ) -> ModelFacts:
        fit(QWEN3_SMALL)
        return QWEN3_SMALL


def chosen(machine: Machine, inventory: Inventory, *options: str) -> Chosen:
    graph = load_graph("components.graphs.aggregated:Frontend")
    resolved = resolve(graph, overrides=list(options), model="m")
    chooser = Chooser(sized=True, machine=machine, environ={})
    return chooser.choose(graph, resolved, inventory, Small(RecordingReport()))


def kv(found: Chosen) -> int:
    value = found.sections["VllmWorker"].values["kv-cache-memory-bytes"]
    assert isinstance(value, int)
    return value


def test_cores_are_not_divided_anew_and_memory_is_that_of_the_start() -> None:
    one, three = (chosen(AT_START, SLOTS, f"--VllmWorker.ServiceArgs.workers={number}") for number in (1, 3))
    assert one.slots is None
    assert kv(one) == kv(three)
    assert one.engine_bytes == three.engine_bytes
    half = chosen(AT_START, SLOTS, "--VllmWorker.ServiceArgs.resources.gpu=0.5")
    assert half.engine_bytes is not None
    assert one.engine_bytes is not None
    # Two of the small ones have room where one of the large ones has.
    assert 2 * half.engine_bytes <= int(32 * GIB * 0.95) // 4
    assert kv(half) < kv(one)


def test_on_gpus_a_share_is_given_to_the_engine() -> None:
    gpus = Inventory("gpu", tuple(Device(i, "gpu", "A GPU", uuid=f"GPU-{i}") for i in range(2)))
    machine = Machine(0, None, 64 * GIB, 64 * GIB, (Gpu(24 * GIB, 24 * GIB),) * 2, 2)
    found = chosen(machine, gpus, "--VllmWorker.ServiceArgs.resources.gpu=0.5")
    assert found.sections["VllmWorker"].values["gpu-memory-utilization"] == 0.46
    assert found.engine_bytes is None
    with pytest.raises(TooLargeError, match="give each worker a larger part of a device"):
        chosen(machine, gpus, "--VllmWorker.ServiceArgs.resources.gpu=0.1")


def test_the_machine_has_the_slots_of_the_inventory() -> None:
    found = machine_of(SLOTS, len(SLOTS.devices))
    assert (found.cores, found.slots, found.gpu_count) == (8, 4, 0)
