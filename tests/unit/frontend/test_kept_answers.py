"""Answers that are kept, through the gate: whoever dies or refuses, each ends as if nothing had been, or says why."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from components.frontend.http.callers import Caller
from components.frontend.http.incoming import replayed
from components.frontend.http.own_requests import ask
from dynamo_local.core.http.asgi import Receive, Scope, Send
from dynamo_local.core.request.recovery import Fidelity, Survival
from state.paths import StatePaths
from tests.unit.frontend.kept_scene import (
    TEXT,
    Application,
    Start,
    at,
    events_of,
    seen,
    told,
    until,
    whole,
)
from tests.unit.state.answers.disks import FullDisk


async def test_another_frontend_goes_on_where_one_has_ended(start: Start) -> None:
    application = Application()
    application.fails = at(4, application)
    first = await start(application)
    answer = await first.begin()
    before = await seen(first, answer, 4)
    await first.close()
    second = await start(Application())
    events = await second.follow(answer)
    assert events[: len(before)] == before
    assert whole(events)
    assert second.application.calls == 1
    assert events[-1]["response"]["output"][0]["id"] == before[3]["item"]["id"]
    assert await second.follow(answer, before[-1]["sequence_number"]) == events[len(before) :]


async def test_any_frontend_shows_follows_cancels_and_deletes(start: Start) -> None:
    application = Application()
    application.fails = at(4, application)
    first, second = await start(application), await start(Application())
    answer = await first.begin()
    await seen(first, answer, 4)
    following = asyncio.create_task(second.follow(answer))
    assert (await second.show(answer))["status"] == "in_progress"
    cancelled = await second.ask(f"/{answer}/cancel")
    assert json.loads(cancelled.body)["status"] == "cancelled"
    events = await following
    assert events[-1]["type"] == "response.cancelled"
    assert told(events) == TEXT[:5]
    # It was never computed by both.
    assert second.application.calls == 0
    assert (await second.ask(f"/{answer}", "DELETE")).status == 200
    assert (await first.ask(f"/{answer}", "GET")).status == 404


async def test_a_copy_of_the_folder_is_a_backup(start: Start, tmp_path: Path) -> None:
    application = Application()
    first = await start(application)
    whole_one = await first.begin()
    events = await first.follow(whole_one)
    application.fails = at(4, application)
    begun = await first.begin()
    before = await seen(first, begun, 4)
    backup = StatePaths(tmp_path / "elsewhere", "n").answers_dir
    shutil.copytree(first.answers.folder.path, backup)
    restored = await start(Application(), root=tmp_path / "elsewhere")
    assert await restored.follow(whole_one) == events
    rest = await restored.follow(begun)
    assert rest[: len(before)] == before
    assert whole(rest)


@pytest.mark.parametrize("position", range(len(TEXT)))
async def test_an_attempt_that_fails_is_made_again_from_the_last_token(start: Start, position: int) -> None:
    application = Application()
    application.fail(position, "no worker is ready")
    frontend = await start(application)
    answer = await frontend.begin()
    assert whole(await frontend.follow(answer))
    assert application.calls == 2


async def test_what_is_the_requests_own_fault_is_not_tried_again(start: Start) -> None:
    application = Application()
    application.fail(3, "no such token", "request")
    frontend = await start(application)
    answer = await frontend.begin()
    events = await frontend.follow(answer)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["message"] == "no such token"
    assert told(events) == TEXT[:3]
    assert application.calls == 1


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"vocabulary": "another"}, "its model has changed"),
        ({"text": "abXdefghij"}, "another text than before"),
        ({"survival": Survival(Fidelity.NONE, "a grammar")}, "the state of a grammar is lost"),
    ],
)
async def test_what_cannot_be_the_same_fails_and_says_why(start: Start, changed: dict[str, Any], why: str) -> None:
    application = Application()
    application.fails = at(4, application)
    first = await start(application)
    answer = await first.begin()
    before = await seen(first, answer, 4)
    await first.close()
    second = await start(Application(**changed))
    events = await second.follow(answer)
    assert events[: len(before)] == before
    assert events[-1]["type"] == "response.failed"
    assert why in events[-1]["response"]["error"]["message"]


async def test_a_prompt_that_is_rendered_otherwise_is_the_one_of_the_beginning(start: Start) -> None:
    """As by a chat template that prints the date, on another day."""
    application = Application(prompt=[1, 2, 3])
    application.fails = at(4, application)
    first = await start(application)
    answer = await first.begin()
    await seen(first, answer, 4)
    await first.close()
    second = await start(Application(prompt=[9]))
    assert whole(await second.follow(answer))
    assert sum(each.prompt for each in first.used + second.used) == 3


async def test_a_long_prompt_is_not_kept_and_must_be_the_same(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.frontend.answers.kept_log.MAX_PROMPT_TOKENS", 1)
    ends = []
    for prompt in ([1, 2], [1, 9]):
        application = Application()
        application.fails = at(4, application)
        first = await start(application)
        answer = await first.begin()
        await seen(first, answer, 4)
        await first.close()
        second = await start(Application(prompt=prompt))
        ends.append((await second.follow(answer))[-1])
        await second.close()
    assert [end["type"] for end in ends] == ["response.completed", "response.failed"]
    assert "its model or its chat template has changed" in ends[1]["response"]["error"]["message"]


async def test_answers_wait_for_a_model_that_is_not_ready(start: Start) -> None:
    frontend = await start(Application())
    frontend.unready = "no worker is ready"
    answer = await frontend.begin()
    assert (await frontend.show(answer))["status"] == "queued"
    frontend.unready = None
    assert whole(await frontend.follow(answer))


async def test_patience_has_an_end(start: Start) -> None:
    frontend = await start(Application(), answer_patience_s=0.0)
    frontend.unready = "no worker is ready"
    events = await frontend.follow(await frontend.begin())
    assert [event["type"] for event in events] == ["response.created", "response.queued", "response.failed"]
    assert "no worker is ready; no token has come for 0 s" in events[-1]["response"]["error"]["message"]


async def test_answers_are_their_owners_alone(start: Start) -> None:
    frontend = await start(Application())
    answer = await frontend.begin()
    for path, method in ((f"/{answer}", "GET"), (f"/{answer}", "DELETE"), (f"/{answer}/cancel", "POST")):
        refused = await frontend.ask(path, method, "bob")
        assert (refused.status, refused.error["param"]) == (404, "response_id")
    refused = await frontend.ask(key="bob", model="m", input="x", previous_response_id=answer)
    assert refused.status == 404
    assert (await frontend.ask(f"/{answer}", "GET", "eve")).status == 401
    await frontend.follow(answer)
    assert (await frontend.show(answer))["status"] == "completed"


async def test_a_priority_that_is_not_allowed_is_refused_at_once(start: Start) -> None:
    frontend = await start(Application(), keys=())
    refused = await frontend.ask(model="m", input="x", background=True, priority=-5)
    assert (refused.status, refused.error["param"]) == (403, "priority")
    assert not list(frontend.answers.folder.path.rglob("resp_*"))


async def test_bounds_are_each_owners(start: Start) -> None:
    frontend = await start(Application(), max_answers=1)
    answer = await frontend.begin()
    refused = await frontend.ask(model="m", input="x", background=True)
    assert refused.status == 507
    assert b"setting max-answers" in refused.body
    assert (await frontend.ask(key="bob", model="m", input="x", background=True)).status == 200
    assert (await frontend.ask(f"/{answer}", "DELETE")).status == 200
    await frontend.begin()


async def test_a_full_disk_fails_the_answer_and_the_rest_goes_on(start: Start) -> None:
    disk, application = FullDisk(), Application()
    application.fails = at(4, application)
    frontend = await start(application, disk=disk)
    answer = await frontend.begin()
    before = await seen(frontend, answer, 4)
    disk.is_full = True
    application.fails = lambda _: None
    application.goes.set()
    events = await frontend.follow(answer)
    assert events[: len(before)] == before
    assert events[-1]["type"] == "response.failed"
    assert "the disk was full" in events[-1]["response"]["error"]["message"]
    refused = await frontend.ask(model="m", input="x", background=True)
    assert refused.status == 507
    assert b"No space left" in refused.body
    disk.is_full = False
    assert whole(await frontend.follow(await frontend.begin()))
    # Its end is what it was, for frontends that come later as well.
    assert await (await start(Application())).follow(answer) == events


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_does_not_wait_ends_an_answer_that_is_not_in_the_background(
    start: Start, stream: bool
) -> None:
    application = Application()
    application.fails = at(4, application)
    frontend = await start(application)
    leaves = asyncio.Event()
    asking = asyncio.create_task(frontend.ask(model="m", input="x", store=True, stream=stream, leaves=leaves))
    await until(lambda: not application.goes.is_set())
    leaves.set()
    await asking
    assert not list(frontend.answers.folder.path.rglob("resp_*"))


async def test_an_answer_that_is_kept_is_told_when_it_is_whole(start: Start) -> None:
    frontend = await start(Application())
    answer = await frontend.ask(model="m", input="x", store=True)
    shown = json.loads(answer.body)
    assert (shown["status"], shown["background"], shown["store"]) == ("completed", False, True)
    assert await frontend.show(shown["id"]) == shown
    assert whole(events_of(await frontend.ask(model="m", input="x", store=True, stream=True)))


async def test_what_an_answer_was_computed_from_is_listed_for_its_owner(start: Start) -> None:
    frontend = await start(Application())
    first = json.loads((await frontend.ask(model="m", input="one", store=True)).body)["id"]
    call = {"type": "function_call_output", "call_id": "c", "output": "2"}
    asked = [call, {"role": "user", "content": "two"}]
    answer = json.loads((await frontend.ask(model="m", input=asked, previous_response_id=first)).body)["id"]
    listed = json.loads((await frontend.ask(f"/{answer}/input_items?order=asc", "GET")).body)
    texts = [item["content"][0]["text"] for item in listed["data"] if item["type"] == "message" and "content" in item]
    assert texts == ["one", "two"]
    assert [item.get("text") or item["type"] for item in listed["data"]] == ["message", TEXT, call["type"], "message"]
    names = [item["id"] for item in listed["data"]]
    assert len(set(names)) == len(names)
    newest = json.loads((await frontend.ask(f"/{answer}/input_items?limit=2", "GET")).body)
    assert ([item["id"] for item in newest["data"]], newest["has_more"]) == (names[:1:-1], True)
    rest = json.loads((await frontend.ask(f"/{answer}/input_items?after={names[2]}", "GET")).body)
    assert ([item["id"] for item in rest["data"]], rest["has_more"]) == (names[1::-1], False)
    assert (await frontend.ask(f"/{answer}/input_items", "GET", key="bob")).status == 404
    assert (await frontend.ask(f"/{answer}/input_items?order=up", "GET")).status == 400


@pytest.mark.parametrize("value", ["true", "on", 1])
async def test_fields_are_read_as_by_the_server_behind(start: Start, value: Any) -> None:
    frontend = await start(Application())
    for field in ("store", "background"):
        asked = await frontend.ask(model="m", input="x", **{field: value})
        answer = json.loads(asked.body)["id"]
        await frontend.follow(answer)
        assert (await frontend.show(answer))["background"] == (field == "background")
    events = events_of(await frontend.ask(model="m", input="x", store=value, stream=value))
    assert told(events) == TEXT
    assert events_of(await frontend.ask(f"/{answer}?stream={value}", "GET")) == await frontend.follow(answer)


class Echo:
    """An application like vLLM's, which keeps nothing; what is to be kept it leaves to another one."""

    def __init__(self) -> None:
        self.kept = Application()
        self.asked: list[dict[str, Any]] = []

    async def __call__(self, asked: Scope, receive: Receive, send: Send) -> None:
        event = await receive()
        fields = json.loads(event["body"])
        if "request_id" in fields:
            await self.kept(asked, replayed(event["body"], receive), send)
            return
        self.asked.append(fields)
        response = {"object": "response", "previous_response_id": None, "text": '"previous_response_id":null'}
        content = json.dumps(response, separators=(",", ":")).encode()
        kind = b"application/json"
        if fields.get("stream"):
            kind, content = b"text/event-stream", b"data: " + content + b"\n\n"
        headers = [(b"content-type", kind), (b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})


async def test_an_answer_that_is_not_kept_goes_on_from_one_that_is(start: Start) -> None:
    application = Echo()
    frontend = await start(application)
    first = json.loads((await frontend.ask(model="m", input="one", store=True)).body)["id"]
    conversation = [{"role": "user", "content": "one"}, {"id": "msg_1", "text": TEXT}]
    for store, stream in ((False, False), ("false", False), (0, True)):
        more = {"previous_response_id": first, "store": store, "stream": stream}
        answer = await frontend.ask(model="m", input="two", **more)
        (told,) = events_of(answer) if stream else [json.loads(answer.body)]
        assert (told["previous_response_id"], told["text"]) == (first, '"previous_response_id":null')
        assert "content-length" not in answer.headers
        asked = application.asked.pop()
        assert asked["input"] == [*conversation, {"role": "user", "content": "two"}]
        assert "previous_response_id" not in asked
    assert len(list(frontend.answers.folder.path.rglob("resp_*"))) == 1
    assert (await frontend.ask(key="bob", model="m", input="x", previous_response_id=first, store=False)).status == 404
    wrong = await frontend.ask(model="m", input="x", previous_response_id=5, store=False)
    assert (wrong.status, wrong.error["param"]) == (400, "previous_response_id")
    assert not application.asked


async def test_requests_of_the_frontend_itself_go_on_from_what_their_owner_has_kept(start: Start) -> None:
    """Lines of batches, and tasks, whose answers are their results."""
    application = Echo()
    frontend = await start(application)
    first = json.loads((await frontend.ask(model="m", input="one", store=True)).body)["id"]
    body = json.dumps({"model": "m", "input": "two", "previous_response_id": first}).encode()
    for answer in (frontend.gate.answer_own, frontend.gate.answer_kept):
        found = await ask(answer, Caller("api-key-file"), "/v1/responses", body, 1000)
        assert (found.status, json.loads(found.body)["previous_response_id"]) == (200, first)
        assert len(application.asked.pop()["input"]) == 3
        assert (await ask(answer, Caller("admin-key-file"), "/v1/responses", body, 1000)).status == 404
    assert len(list(frontend.answers.folder.path.rglob("resp_*"))) == 1


async def test_what_the_application_refuses_is_not_kept(start: Start) -> None:
    frontend = await start(Application())
    refused = await frontend.ask(model="m", input="x", background=True, temperature=3)
    assert (refused.status, refused.body.count(b"temperature")) == (400, 1)
    assert not list(frontend.answers.folder.path.rglob("resp_*"))
    assert (await frontend.ask(model="m", input="x", background=True, store=False)).status == 400


async def test_a_store_of_a_later_release_is_left_alone(start: Start, tmp_path: Path) -> None:
    folder = StatePaths(tmp_path, "n").answers_dir
    folder.mkdir(mode=0o700)
    (folder / "store.json").write_text('{"schema_version": 9}')
    frontend = await start(Application())
    refused = await frontend.ask(model="m", input="x", background=True)
    assert refused.status == 503
    assert b"version 9" in refused.body
