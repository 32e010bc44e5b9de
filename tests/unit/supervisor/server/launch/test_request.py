"""What the spec of an endpoint asks for."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import UsageError
from dynamo_local.sdk.config.sections import Flag
from dynamo_local.supervisor.server.launch.addresses import KV_NETWORK
from dynamo_local.supervisor.server.launch.request import (
    KV_STREAM,
    ServeRequest,
    check_settings,
    request_of_endpoint,
)

NETWORK, STREAM = ServeRequest(None, kv_network="10.1.2.0/24"), ServeRequest(None, kv_stream=True)


@pytest.mark.parametrize("args", [{"ssl_ciphers": "x"}, {"root-path": "/x"}, {"Frontend": {"allowed-origins": ["*"]}}])
def test_an_endpoint_has_no_http_server_of_its_own(args: dict[str, Any]) -> None:
    spec = EndpointSpec(name="a", model="m", args=args)
    for use in (check_settings, request_of_endpoint):
        with pytest.raises(UsageError, match="is about the HTTP server") as refused:
            use(spec)
        assert "dynamo serve" in str(refused.value.remedy)


def test_an_option_of_the_server_is_for_all_endpoints_but_those_that_have_their_own() -> None:
    def networks(**args: str) -> list[str]:
        spec = EndpointSpec(name="a", model="m", args={key.replace("_", "-"): text for key, text in args.items()})
        flags = request_of_endpoint(spec, flags=NETWORK.kv_flags).flags
        return [flag.text for flag in flags if flag.path == ("kv-network",)]

    assert networks() == ["10.1.2.0/24"]
    assert networks(kv_network="10.9.9.0/24") == ["10.9.9.0/24"]


def test_an_endpoint_that_chooses_the_other_way_of_kv_does_without_the_servers() -> None:
    def ways(flags: tuple[Flag, ...], args: dict[str, Any]) -> list[str]:
        request = request_of_endpoint(EndpointSpec(name="a", model="m", args=args), flags=flags)
        # Refused by the workers' settings if there are both.
        request.resolve()
        return [flag.text for flag in request.flags if flag.path[0] in (KV_NETWORK, KV_STREAM)]

    network, stream = NETWORK.kv_flags, STREAM.kv_flags
    assert ways(stream, {"kv-network": "10.9.9.0/24"}) == ["10.9.9.0/24"]
    assert ways(stream, {"VllmWorker": {"kv-network": "10.9.9.0/24"}}) == []
    assert ways(network, {"kv-stream": True}) == ["true"]
    assert ways(network, {"kv-stream": False}) == ["10.1.2.0/24", "false"]
    assert ways(stream, {}) == ["true"]
