"""Interfaces by the network that their addresses are in."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

import pytest

from state.machine.interfaces import interface_in, interfaces, reaches_others

FOUND = {"eth0": IPv4Address("10.1.2.3"), "eth1": IPv4Address("10.1.3.3")}


@pytest.mark.parametrize(
    ("network", "name"),
    [("10.1.2.0/24", "eth0"), ("10.1.3.3/32", "eth1"), ("10.1.0.0/16", "eth0"), ("10.2.0.0/16", None)],
)
def test_an_interface_is_found_by_its_address(network: str, name: str | None) -> None:
    assert interface_in(IPv4Network(network), FOUND) == name


@pytest.mark.parametrize(
    ("flags", "reaches"),
    [(0x1043, True), (0x49, False), (0x1002, False), (0x1003, False)],
    ids=["up", "loopback", "down", "no carrier"],
)
def test_by_loopback_or_an_interface_that_is_down_no_other_machine_is_reached(flags: int, *, reaches: bool) -> None:
    assert reaches_others(flags) is reaches


def test_all_addresses_of_a_machine_do_not_mean_its_loopback() -> None:
    """Between two machines 127.0.0.1 would be the reader itself."""
    found = interfaces()
    assert "lo" not in found
    assert interface_in(IPv4Network("0.0.0.0/0")) == next(iter(found), None)
    assert interface_in(IPv4Network("127.0.0.0/8")) is None
