"""What the server is told of requests: each change once, and of too many new requests only some, whole."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from components.frontend.requests.live_requests import MOST_NEW, LiveRequest, LiveRequests, RequestEvents
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.messages.work import TokenDelta
from dynamo_local.core.ports import Request
from dynamo_local.core.request.log import RequestLog


class Scene:
    """Live requests of a frontend, whose workers' leases are `lease N` of the watchers `WN`."""

    def __init__(self) -> None:
        self.now = 100.0
        self.live = LiveRequests()
        self.news = RequestEvents(self.live, lambda lease: lease.replace("lease ", "W"), lambda: self.now)

    def begin(self, name: str) -> LiveRequest:
        live = LiveRequest(
            Request(name, [1, 2, 3], lambda position, at_most=None: b"", 0.0),
            RequestLog(name, [1, 2, 3]),
            born_at=self.now,
        )
        self.live[name] = live
        return live

    def take_token(self, live: LiveRequest) -> None:
        delta = TokenDelta(live.request_id, live.log.epoch, live.log.position, [7])
        live.log.accept(delta)
        live.accepted(self.now)

    def end(self, live: LiveRequest, failed: bool = False) -> None:
        del self.live[live.request_id]
        self.news.end(live, failed)

    def told(self) -> Sequence[Event]:
        news = self.news.look()
        return () if news is None else news.events


def gist(events: Sequence[Event]) -> list[tuple[str | None, str, str, int | None]]:
    return [(one.request, one.what, one.watcher, one.tokens) for one in events]


def test_each_change_of_a_request_is_told_once() -> None:
    scene = Scene()
    live = scene.begin("a")
    assert not scene.told()
    live.log.assign("lease 1")
    scene.now += 0.25
    scene.take_token(live)
    scene.now += 0.25
    scene.take_token(live)
    events = scene.told()
    assert gist(events) == [("a", "is with a worker", "W1", 2), ("a", "first token", "W1", 1)]
    assert [one.took_s for one in events] == [0.5, 0.25]
    assert not scene.told()
    live.log.give_up(live.log.epoch)
    assert not scene.told()
    live.log.assign("lease 2")
    scene.end(live, failed=True)
    assert gist(scene.told()) == [("a", "is with a worker", "W2", 2), ("a", "failed", "W2", 2)]
    assert not scene.told()


def test_a_request_that_ends_between_two_looks_is_told_whole() -> None:
    scene = Scene()
    live = scene.begin("a")
    live.log.assign("lease 1")
    scene.take_token(live)
    scene.end(live)
    assert [one.what for one in scene.told()] == ["is with a worker", "first token", "ended"]


@given(st.lists(st.integers(0, 3 * MOST_NEW), min_size=1, max_size=4))
def test_requests_that_are_too_many_are_left_out_from_beginning_to_end(crowds: Sequence[int]) -> None:
    """Each crowd comes at once, and ends after the next has come."""
    scene, number = Scene(), 0
    told: list[Event] = []
    left_out = 0
    before: list[LiveRequest] = []
    for crowd in (*crowds, 0):
        new = [scene.begin(str(number + each)) for each in range(crowd)]
        number += crowd
        for live in new:
            live.log.assign("lease 1")
        news = scene.news.look()
        if news is not None:
            told += news.events
            left_out += news.left_out
        for live in before:
            scene.end(live)
        before = new
    told += scene.told()
    begun = [one.request for one in told if one.what == "is with a worker"]
    assert sorted(map(str, begun)) == sorted(str(one.request) for one in told if one.what == "ended")
    assert len(begun) == sum(min(crowd, MOST_NEW) for crowd in crowds)
    assert left_out == sum(crowds) - len(begun)
