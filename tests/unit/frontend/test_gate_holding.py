"""Requests that come while their model has no worker: held, told of it, bounded, and none forgotten."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from components.frontend.http import exchange, generation
from components.frontend.http.gate import HttpGate
from components.frontend.http.models import ModelEntry, ModelTable
from dynamo_local.core.http import waiting
from dynamo_local.core.http.bounds.admission import AdmissionLimits
from tests.unit.frontend.asgi_driver import Answer, Backend, call, scope

STREAM = (200, "text/event-stream; charset=utf-8", b"data: {}\n\n")


class Waking:
    """A gate before a model that is not ready yet. Its clock stands, unless it is moved."""

    def __init__(self, **limits: Any) -> None:
        self.limits = AdmissionLimits(**limits)
        self.why: str | None = "endpoint m is starting: loading the model"
        self.comes = True
        self.draining = False
        self.now = 0.0
        self.backend = Backend()
        self.entry = self.another()
        self.table = ModelTable([self.entry])
        self.gate = HttpGate(
            self.backend, limits=self.limits, models=self.table, is_draining=lambda: self.draining, api_keys=["key"]
        )
        self.gate._generations._clock = lambda: self.now

    def another(self) -> ModelEntry:
        return ModelEntry(["m"], lambda: self.why, self.limits, self.backend, comes=lambda: self.comes)

    def ask(self, path: str = "/v1/completions", *, key: str = "key", **more: Any) -> asyncio.Task[Answer]:
        driven = {name: more.pop(name) for name in ("leaves", "answer") if name in more}
        asked = scope(path, headers=[("Authorization", f"Bearer {key}")])
        body = [json.dumps({"model": "m", **more}).encode()]
        return asyncio.create_task(call(self.gate, asked, body, **driven))

    async def held(self, number: int) -> None:
        async with asyncio.timeout(30):
            while self.table.held() != {"m": number}:  # noqa: ASYNC110
                await asyncio.sleep(0)

    def is_ready(self) -> None:
        self.why = None
        self.entry.look()

    async def told(self, answer: Answer, text: bytes) -> None:
        """Move the clock until the client of a stream has been told so."""
        async with asyncio.timeout(30):
            while text not in answer.body:
                self.now += waiting.BEGIN_AFTER_S
                self.table.wake()
                await asyncio.sleep(0)


@pytest.fixture
async def house() -> Waking:
    return Waking(max_requests=6, max_n=3, max_held=4)


async def test_requests_wait_for_their_model_and_go_on_in_the_order_in_which_they_came(house: Waking) -> None:
    asked = []
    for number in range(4):
        asked.append(house.ask(prompt=str(number)))
        await house.held(number + 1)
    assert (house.entry.demand, house.entry.in_flight.total) == (4, 0)
    house.entry.look()
    house.is_ready()
    assert [(await each).body for each in asked] == [b"served"] * 4
    assert [json.loads(body)["prompt"] for _, _, body in house.backend.requests] == list("0123")
    assert (house.entry.demand, house.table.held()) == (0, {"m": 0})


async def test_urgent_requests_go_on_first(house: Waking) -> None:
    asked = []
    for number, priority in enumerate((5, 0, -1, 0)):
        asked.append(house.ask(prompt=str(number), priority=priority))
        await house.held(number + 1)
    house.is_ready()
    assert [(await each).status for each in asked] == [200] * 4
    assert [json.loads(body)["prompt"] for _, _, body in house.backend.requests] == list("2130")


async def test_lower_classes_take_no_room_from_higher_ones(house: Waking) -> None:
    background = [house.ask(priority=1) for _ in range(4)]
    await house.held(4)
    # Neither does who waits in the line of another class, nor what is in flight there.
    assert (await house.ask(priority=2)).status == 429
    normal = [house.ask(n=2) for _ in range(3)]
    await house.held(7)
    answer = await house.ask()
    assert (answer.status, int(answer.headers["retry-after"]) > 0) == (429, True)
    assert "6 of at most 6 sequences of priority normal or higher" in answer.error["message"]
    urgent = house.ask(priority=-1)
    await house.held(8)
    by_class = {("m", "high"): 1, ("m", "normal"): 3, ("m", "background"): 4}
    assert house.table.held_by_class() == by_class
    refused = {series: number for series, number in house.table.refused().items() if number}
    assert refused == {("m", "background", "max-held"): 1, ("m", "normal", "max-requests"): 1}
    assert house.entry.demand == 11
    house.is_ready()
    assert [(await each).status for each in (*background, *normal, urgent)] == [200] * 8
    assert (house.entry.demand, house.entry.in_flight.total) == (0, 0)


async def test_what_is_wrong_is_refused_before_the_wait(house: Waking) -> None:
    assert (await house.ask(n=4)).status == 400
    assert (await house.ask(key="wrong")).status == 401
    assert (await house.ask("/v1/nothing")).status == 404
    waiting = [house.ask(n=3), house.ask(n=2)]
    await house.held(2)
    assert (await house.ask(n=2)).status == 429
    assert house.entry.demand == 5
    house.is_ready()
    assert [(await each).status for each in waiting] == [200, 200]


async def test_more_than_may_wait_are_told_why(house: Waking) -> None:
    waiting = [house.ask() for _ in range(4)]
    await house.held(4)
    answer = await house.ask()
    why = "4 requests (setting max-held) wait for it already"
    assert answer.error["message"] == f"{house.why}; {why}; send it again later"
    assert (answer.status, int(answer.headers["retry-after"]) > 0) == (429, True)
    assert (answer.error["type"], answer.error["code"]) == ("requests", "rate_limit_exceeded")
    house.is_ready()
    assert [(await each).status for each in waiting] == [200] * 4


@pytest.mark.parametrize("streams", [False, True])
async def test_a_start_that_fails_is_told_to_all_who_wait(house: Waking, streams: bool) -> None:
    waiting = [house.ask(stream=streams) for _ in range(3)]
    await house.held(3)
    house.why, house.comes = "endpoint m is failed: no such model", False
    house.entry.look()
    for each in waiting:
        answer = await each
        assert (answer.status, answer.error["message"]) == (503, house.why)
    assert house.backend.requests == []
    assert (await house.ask()).status == 503


async def test_a_server_that_stops_lets_nobody_wait(house: Waking) -> None:
    waiting = [house.ask() for _ in range(3)]
    await house.held(3)
    house.draining = True
    house.table.wake()
    assert {(await each).error["message"] for each in waiting} == {"the server is shutting down"}


async def test_a_request_waits_no_longer_than_is_set(house: Waking) -> None:
    asked = house.ask()
    await house.held(1)
    house.now = 299.0
    house.table.wake()
    await asyncio.sleep(0)
    assert not asked.done()
    house.now = 300.0
    house.table.wake()
    answer = await asked
    assert (answer.status, "waited for 300 s (setting hold-timeout-s)" in answer.error["message"]) == (503, True)


async def test_the_timeout_needs_no_change_to_be_noticed() -> None:
    house = Waking(hold_timeout_s=0.01)
    house.gate._generations._clock = asyncio.get_running_loop().time
    assert (await house.ask()).status == 503


async def test_a_client_that_leaves_is_forgotten_at_once(house: Waking) -> None:
    leaves = asyncio.Event()
    left, stays = house.ask(leaves=leaves, n=2), house.ask()
    await house.held(2)
    leaves.set()
    assert (await left).status is None
    assert (house.table.held(), house.entry.demand) == ({"m": 1}, 1)
    house.is_ready()
    assert (await stays).status == 200
    assert len(house.backend.requests) == 1


async def test_held_requests_follow_their_model_to_its_next_revision(house: Waking) -> None:
    asked = house.ask(n=2)
    await house.held(1)
    old, house.entry = house.entry, house.another()
    house.table.replace([house.entry])
    await house.held(1)
    assert (old.demand, house.entry.demand) == (0, 2)
    house.is_ready()
    assert (await asked).status == 200
    lost = house.ask()
    house.why = "endpoint m is starting"
    await house.held(1)
    house.table.replace([])
    assert (await lost).status == 404


async def test_what_the_application_refuses_never_waits(house: Waking) -> None:
    assert (await house.ask(refuses=True)).status == 400
    assert (house.table.held(), house.entry.demand, house.backend.requests) == ({"m": 0}, 0, [])
    assert house.table.hold_times.histograms == {}


async def test_held_requests_are_examined_anew_by_another_application(house: Waking) -> None:
    house.backend.refuses = b"nothing"
    fits, does_not = house.ask(n=2), house.ask(prompt="refuses")
    await house.held(2)
    old, house.backend = house.backend, Backend()
    house.entry = house.another()
    house.table.replace([house.entry])
    await house.held(2)
    house.is_ready()
    assert ((await fits).status, (await does_not).status) == (200, 400)
    assert (old.requests, len(house.backend.requests), house.entry.demand) == ([], 1, 0)
    assert set(house.table.hold_times.histograms) == {("m", "no", "served")}


async def test_a_stream_begins_after_a_second_and_says_what_it_waits_for(house: Waking) -> None:
    house.backend.answers = STREAM
    house.backend.open.clear()
    answer = Answer()
    asked = house.ask(stream=True, answer=answer)
    await house.held(1)
    assert answer == Answer()
    await house.told(answer, b": waiting for a worker of m: endpoint m is starting: loading the model\n\n")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")
    house.is_ready()
    await house.backend.entered.acquire()
    house.backend.open.set()
    await asked
    assert answer.ended
    assert answer.body.endswith(b"\n\ndata: {}\n\n")


async def test_comments_go_on_until_the_first_event() -> None:
    sent: list[Any] = []
    enough = asyncio.Event()

    async def send(event: Any) -> None:
        sent.append(event)
        if len(sent) > 4:
            enough.set()

    early = exchange.EarlyAnswer(send, "/v1/completions", every_s=0.001)
    await early.tell("a")
    with early.commented(lambda: generation._FIRST_TOKEN):
        await early(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
        )
        await enough.wait()
        await early({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
        number = len(sent)
        await asyncio.sleep(0.01)
        assert len(sent) == number
        await early({"type": "http.response.body", "body": b"", "more_body": False})
    assert [event["type"] for event in sent].count("http.response.start") == 1
    assert sent[2]["body"] == b": waiting for the first token\n\n"


@pytest.mark.parametrize(
    ("status", "kind", "body"),
    [
        (400, "application/json", b'{"error": {"message": "bad", "code": 400}}'),
        (500, "text/plain", b"bad"),
        (200, "", b"bad"),
    ],
)
async def test_an_answer_that_is_no_stream_becomes_an_error_event(status: int, kind: str, body: bytes) -> None:
    house = Waking()
    house.backend.answers = (status, kind, body)
    answer = Answer()
    asked = house.ask(stream=True, answer=answer)
    await house.held(1)
    await house.told(answer, b"waiting")
    house.is_ready()
    await asked
    comments, error, done, rest = answer.body.rsplit(b"\n\n", 3)
    assert comments.startswith(b": waiting")
    assert json.loads(error.removeprefix(b"data: "))["error"]["message"] == "bad"
    assert (answer.status, done, rest, answer.ended) == (200, b"data: [DONE]", b"", True)


async def test_a_failed_start_is_an_error_event_in_a_stream_that_has_begun(house: Waking) -> None:
    answer = Answer()
    asked = house.ask("/v1/messages", stream=True, answer=answer)
    await house.held(1)
    await house.told(answer, b"waiting")
    house.why, house.comes = "endpoint m is failed", False
    house.entry.look()
    await asked
    assert answer.ended
    name, data = answer.body.strip().split(b"\n")[-2:]
    assert name == b"event: error"
    assert json.loads(data.removeprefix(b"data: ")) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "endpoint m is failed"},
    }


async def test_paths_without_streams_wait_without_a_byte(house: Waking) -> None:
    answer = Answer()
    asked = house.ask("/v1/embeddings", stream=True, answer=answer)
    await house.held(1)
    house.now = 200.0
    house.table.wake()
    await asyncio.sleep(0)
    assert answer.status is None
    house.is_ready()
    assert (await asked).body == b"served"
