"""The tools for the endpoints of one server share the machine of its start."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_local.cli.serving.choosing import ModelChooser
from dynamo_local.cli.serving.endpoint_tools import EndpointToolMaker, check_settings
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import UsageError
from dynamo_local.sdk.config.configuration import resolve
from dynamo_local.sdk.config.flags import KV_NETWORK, KV_STREAM, Flag, kv_network_flag, kv_stream_flag
from dynamo_local.sdk.graph import load_graph
from dynamo_local.supervisor.endpoints.revisions.launch import AGGREGATED
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


@pytest.mark.parametrize("args", [{"ssl_ciphers": "x"}, {"root-path": "/x"}, {"Frontend": {"allowed-origins": ["*"]}}])
def test_an_endpoint_has_no_http_server_of_its_own(args: dict[str, Any]) -> None:
    spec = EndpointSpec(name="a", model="m", args=args)
    tools = EndpointToolMaker.at_start(cpu_slots(range(4), 2))
    for use in (check_settings, lambda spec: tools(spec, cpu_slots(range(4), 2), RecordingReport())):
        with pytest.raises(UsageError, match="is about the HTTP server") as refused:
            use(spec)
        assert "dynamo serve" in str(refused.value.remedy)


def test_an_option_of_the_server_is_for_all_endpoints_but_those_that_have_their_own() -> None:
    slots = cpu_slots(range(4), 2)
    tools = EndpointToolMaker.at_start(slots, kv_network_flag("10.1.2.0/24"))

    def networks(**args: str) -> list[str]:
        spec = EndpointSpec(name="a", model="m", args={key.replace("_", "-"): text for key, text in args.items()})
        flags = tools(spec, slots, RecordingReport()).flags
        return [flag.text for flag in flags if flag.path == ("kv-network",)]

    assert networks() == ["10.1.2.0/24"]
    assert networks(kv_network="10.9.9.0/24") == ["10.9.9.0/24"]


def test_an_endpoint_that_chooses_the_other_way_of_kv_does_without_the_servers() -> None:
    slots = cpu_slots(range(4), 2)

    def ways(flags: tuple[Flag, ...], args: dict[str, Any]) -> list[str]:
        tools = EndpointToolMaker.at_start(slots, flags)(
            EndpointSpec(name="a", model="m", args=args), slots, RecordingReport()
        )
        # Refused by the workers' settings if there are both.
        resolve(load_graph(AGGREGATED), None, tools.overrides, None, "m", flags=tools.flags)
        return [flag.text for flag in tools.flags if flag.path[0] in (KV_NETWORK, KV_STREAM)]

    network, stream = kv_network_flag("10.1.2.0/24"), kv_stream_flag(given=True)
    assert ways(stream, {"kv-network": "10.9.9.0/24"}) == ["10.9.9.0/24"]
    assert ways(stream, {"VllmWorker": {"kv-network": "10.9.9.0/24"}}) == []
    assert ways(network, {"kv-stream": True}) == ["true"]
    assert ways(network, {"kv-stream": False}) == ["10.1.2.0/24", "false"]
    assert ways(stream, {}) == ["true"]
