from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from dynamo_local.supervisor.server.serve import handled_signals


@pytest.fixture(autouse=True)
def hangup_as_it_was() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_hangup_ends_the_server_unless_it_was_started_to_survive_one() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert signal.SIGHUP in handled_signals()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert handled_signals() == (signal.SIGINT, signal.SIGTERM)
