from __future__ import annotations

import socket

import pytest

from dynamo_local.core.errors import PortInUseError, UsageError
from dynamo_local.supervisor.server.launch.listening import answers, claim_address


def test_port_0_becomes_a_free_port_on_which_nobody_answers() -> None:
    address = claim_address("127.0.0.1", 0)
    assert address.port > 0
    assert not answers(address)
    assert claim_address("127.0.0.1", address.port) == address


def test_a_taken_port_is_refused_and_answers() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"port {port} on 127.0.0.1 is in use"):
            claim_address("127.0.0.1", port)
        with pytest.raises(PortInUseError):
            claim_address("0.0.0.0", port)


def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(UsageError, match=r"cannot listen on 203\.0\.113\.1:8000"):
        claim_address("203.0.113.1", 8000)
