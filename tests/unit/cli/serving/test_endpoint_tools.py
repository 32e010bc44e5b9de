"""The tools for the endpoints of one server share the machine of its start."""

from __future__ import annotations

from dynamo_local.cli.serving.choosing import ModelChooser
from dynamo_local.cli.serving.endpoint_tools import EndpointToolMaker
from dynamo_local.core.endpoints.spec import EndpointSpec
from state.devices.allocation import cpu_slots
from tests.unit.supervisor.recording import RecordingReport


def test_every_endpoint_is_sized_for_the_machine_of_the_start() -> None:
    slots = cpu_slots(range(4), 2)
    tools = EndpointToolMaker.at_start(slots)
    choosers = [tools(EndpointSpec(name=name, model="m"), slots, RecordingReport()).choose for name in ("a", "b")]
    for chooser in choosers:
        assert isinstance(chooser, ModelChooser)
        assert chooser.machine is tools.machine
    assert (tools.machine.cores, tools.machine.slots) == (4, 2)
