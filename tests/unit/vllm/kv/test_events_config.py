from __future__ import annotations

from types import SimpleNamespace

import pytest

from dynamo_local.core.errors import EngineError
from dynamo_local.engine.vllm.kv.events_config import check_events_config


def config(endpoint: str, replay: str | None = None, *, publisher: str = "zmq", on: bool = True) -> SimpleNamespace:
    return SimpleNamespace(enable_kv_cache_events=on, publisher=publisher, endpoint=endpoint, replay_endpoint=replay)


@pytest.mark.parametrize(
    "refused",
    [
        config("tcp://*:5557"),
        config("tcp://0.0.0.0:5557"),
        config("tcp://[::]:5557"),
        config("ipc:///private/events", "tcp://*:5558"),
    ],
)
def test_events_are_not_published_to_everybody(refused: SimpleNamespace) -> None:
    with pytest.raises(EngineError, match="whoever reaches this machine"):
        check_events_config(refused)


@pytest.mark.parametrize(
    "taken",
    [
        None,
        config("tcp://*:5557", on=False),
        config("tcp://*:5557", publisher="null"),
        config("ipc:///private/events", "ipc:///private/replay"),
        config("tcp://127.0.0.1:5557"),
    ],
)
def test_a_subscriber_of_the_user_s_own_gets_them(taken: SimpleNamespace | None) -> None:
    check_events_config(taken)
