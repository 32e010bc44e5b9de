"""Workers of endpoints are sized for the machine, and refused before they start if it has no memory for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_local.core.errors import UsageError
from dynamo_local.sdk.config.resolved import ResolvedGraph
from dynamo_local.supervisor.endpoints.revisions.launch import EndpointLauncher, Launched
from dynamo_local.supervisor.server.launch.plan import HttpAddress, Launch
from dynamo_local.supervisor.server.launch.templates import ServiceTemplate
from state.devices.allocation import Inventory, cpu_slots
from state.paths import StatePaths
from tests.unit.supervisor.recording import RecordingReport

GRAPH = ResolvedGraph("m:F", "ns", ())


def server(root: Path, inventory: Inventory) -> Launch:
    return Launch(GRAPH, inventory, StatePaths(root, "ns"), None, HttpAddress("127.0.0.1", 1), (), ())


def test_more_memory_than_is_free_is_refused_in_one_line(tmp_path: Path) -> None:
    launcher = EndpointLauncher(server(tmp_path, cpu_slots([0], 1)), RecordingReport())
    templates = (ServiceTemplate("VllmWorker", "aggregated", (), {}, 1, 1),)
    launcher.check_room(Launched(GRAPH, templates, 1), 1, prefill=False)
    large = Launched(GRAPH, templates, 2**60)
    with pytest.raises(UsageError, match="of memory is free, and 2 more workers need") as caught:
        launcher.check_room(large, 2, prefill=False)
    assert "\n" not in str(caught.value)
    # Nothing is to be loaded, or to be started.
    launcher.check_room(large, 2, prefill=False, shared=2**60)
    launcher.check_room(large, 0, prefill=False)
    launcher.check_room(large, 2, prefill=True)


def test_every_endpoint_is_sized_for_the_machine_of_the_start(tmp_path: Path) -> None:
    machine = EndpointLauncher(server(tmp_path, cpu_slots(range(4), 2)), RecordingReport()).machine
    assert (machine.cores, machine.slots) == (4, 2)
