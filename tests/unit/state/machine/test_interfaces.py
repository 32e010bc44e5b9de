"""Interfaces by the network that their addresses are in."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

import pytest

from state.machine.interfaces import interface_in, interfaces

FOUND = {"lo": IPv4Address("127.0.0.1"), "eth0": IPv4Address("10.1.2.3"), "eth1": IPv4Address("10.1.3.3")}


@pytest.mark.parametrize(
    ("network", "name"),
    [("10.1.2.0/24", "eth0"), ("10.1.3.3/32", "eth1"), ("10.1.0.0/16", "eth0"), ("10.2.0.0/16", None)],
)
def test_an_interface_is_found_by_its_address(network: str, name: str | None) -> None:
    assert interface_in(IPv4Network(network), FOUND) == name


def test_this_machine_has_a_loopback_interface() -> None:
    assert interfaces()["lo"] == IPv4Address("127.0.0.1")
    assert interface_in(IPv4Network("127.0.0.0/8")) == "lo"
