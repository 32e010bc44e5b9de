"""What has become of an endpoint, counted by its events."""

from __future__ import annotations

from dynamo_local.core.endpoints.history import noted
from dynamo_local.core.messages.endpoints import EndpointHistory
from dynamo_local.core.messages.events import Event


def history_of(*events: Event) -> EndpointHistory:
    history = EndpointHistory()
    for event in events:
        history = noted(history, event)
    return history


def test_each_change_counts_once_by_its_cause() -> None:
    found = history_of(
        Event("sleep", "asleep", "nobody has asked for it yet", cause="start", time=1.0),
        Event("endpoint", "created: model m", time=2.0),
        Event("wake", "woken by a request", "it was asleep", cause="request", time=3.0),
        Event("wake", "awake after 0.50 s", cause="request", took_s=0.5, time=3.5),
        Event("park", "parked", "no request for 60 s", cause="idle", time=70.0),
        Event("wake", "woken by order", "it was parked", cause="order", time=80.0),
        Event("swap", "yields its device to code", "asked for 1 s ago", to="code", time=90.0),
        Event("sleep", "asleep", "its device was given to code", cause="swap", time=91.0),
        Event("swap", "gave its device to code within 2.00 s", to="code", took_s=2.0, time=92.0),
    )
    assert found.sleeps == {"swap": 1}
    assert found.wakes == {"request": 1, "order": 1}
    assert found.parks == {"idle": 1}
    assert found.swaps == 1
    assert (found.last, found.last_at) == ("gave its device to code within 2.00 s", 92.0)


def test_a_swap_that_is_only_decided_does_not_count() -> None:
    found = history_of(Event("swap", "yields its device to code", "asked for 1 s ago", to="code", time=9.0))
    assert (found.swaps, found.last) == (0, "yields its device to code: asked for 1 s ago")
