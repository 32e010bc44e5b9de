"""The tools for the endpoints of one server share the machine of its start."""

from __future__ import annotations

from dynamo_local.cli.serving.choosing import ModelChooser
from dynamo_local.cli.serving.endpoint_tools import EndpointToolMaker
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.sdk.config.flags import kv_network_flag
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


def test_an_option_of_the_server_is_for_all_endpoints_but_those_that_have_their_own() -> None:
    slots = cpu_slots(range(4), 2)
    tools = EndpointToolMaker.at_start(slots, kv_network_flag("10.1.2.0/24"))

    def networks(**args: str) -> list[str]:
        spec = EndpointSpec(name="a", model="m", args={key.replace("_", "-"): text for key, text in args.items()})
        flags = tools(spec, slots, RecordingReport()).flags
        return [flag.text for flag in flags if flag.path == ("kv-network",)]

    assert networks() == ["10.1.2.0/24"]
    assert networks(kv_network="10.9.9.0/24") == ["10.9.9.0/24"]
