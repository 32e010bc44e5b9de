from __future__ import annotations

import pytest

from dynamo_local.core.messages.presence import EngineInfo, Presence
from dynamo_local.core.routing.pulling import is_worth_pulling


def worker(machine: str, network: str = "") -> Presence:
    engine = EngineInfo("e", "m", 4096, 16, 64, 8, kv_network=network)
    return Presence("w", "W", "decode", "w", 1, "ready", engine=engine, machine=machine)


@pytest.mark.parametrize(("source", "reader", "worth"), [("a", "a", True), ("a", "b", False), ("a", "", False)])
def test_a_prefix_is_pulled_on_one_machine_alone_without_a_network(source: str, reader: str, worth: bool) -> None:
    assert is_worth_pulling(100_000, worker(source), worker(reader)) is worth


@pytest.mark.parametrize(("tokens", "machine", "worth"), [(1000, "a", True), (1000, "b", False), (4096, "b", True)])
def test_between_machines_it_takes_more_tokens(tokens: int, machine: str, worth: bool) -> None:
    assert is_worth_pulling(tokens, worker("a", "10.1.2.0/24"), worker(machine, "10.1.2.0/24")) is worth


@pytest.mark.parametrize(("machine", "network"), [("b", ""), ("b", "10.9.9.0/24"), ("", "10.1.2.0/24"), ("a", "")])
def test_both_must_be_in_one_network_or_in_none(machine: str, network: str) -> None:
    assert not is_worth_pulling(100_000, worker("a", "10.1.2.0/24"), worker(machine, network))
