from __future__ import annotations

import pytest

from dynamo_local.core.messages.presence import EngineInfo, Presence
from dynamo_local.core.routing.pulling import is_worth_pulling


def worker(machine: str) -> Presence:
    return Presence("w", "W", "decode", "w", 1, "ready", engine=EngineInfo("e", "m", 4096, 16, 64, 8), machine=machine)


@pytest.mark.parametrize(("source", "reader", "worth"), [("a", "a", True), ("a", "b", False), ("a", "", False)])
def test_a_prefix_is_pulled_on_one_machine_alone(source: str, reader: str, worth: bool) -> None:
    assert is_worth_pulling(100_000, worker(source), worker(reader)) is worth
