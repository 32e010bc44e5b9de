"""A worker for which the machine has no memory is refused before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_local.core.errors import UsageError
from dynamo_local.sdk.config.resolved import ResolvedGraph
from dynamo_local.supervisor.endpoints.revisions.launch import EndpointLauncher, Launched, ModelTools
from dynamo_local.supervisor.server.launch.templates import ServiceTemplate
from state.devices.allocation import cpu_slots
from tests.unit.supervisor.recording import RecordingReport


def no_tools(*_: object) -> ModelTools:
    raise AssertionError("nothing is launched")


def test_more_memory_than_is_free_is_refused_in_one_line(tmp_path: Path) -> None:
    launcher = EndpointLauncher("ns", tmp_path, cpu_slots([0], 1), no_tools, RecordingReport())
    graph = ResolvedGraph("m:F", "ns", ())
    templates = (ServiceTemplate("VllmWorker", "aggregated", (), {}, 1, 1),)
    launcher.check_room(Launched(graph, templates, 1), 1, prefill=False)
    large = Launched(graph, templates, 2**60)
    with pytest.raises(UsageError, match="of memory is free, and 2 more workers need") as caught:
        launcher.check_room(large, 2, prefill=False)
    assert "\n" not in str(caught.value)
    # Nothing is to be started.
    launcher.check_room(large, 0, prefill=False)
    launcher.check_room(large, 2, prefill=True)
