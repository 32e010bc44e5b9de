"""Answers that are kept, through the gate: whoever dies or refuses, each ends as if nothing had been, or says why."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from components.frontend.answers.answers import Answers
from components.frontend.answers.limits import AnswerLimits
from components.frontend.answers.recording import current_recording
from components.frontend.answers.rest import AnswersRest
from components.frontend.http.administration import Administration
from components.frontend.http.gate import HttpGate
from components.frontend.http.models import ModelEntry, ModelTable
from dynamo_local.core.http.admission import AdmissionLimits
from dynamo_local.core.http.asgi import Receive, Scope, Send
from dynamo_local.core.http.paths import RESPONSES
from dynamo_local.core.messages.tokens import Fault, TokenDelta
from dynamo_local.core.ports import Request
from dynamo_local.core.request.fidelity import Fidelity, Survival
from dynamo_local.tasks import TaskGuard
from state.answers.folder import AnswerFolder
from state.paths import StatePaths
from tests.unit.frontend.asgi_driver import Answer, call, scope
from tests.unit.state.answers.disks import FullDisk

TEXT = "abcdefghij"
PATIENCE_S = 60.0
KEYS = ("alice", "bob")
"""Of two files, which are two owners."""


class CutOffError(Exception):
    """The application's call ends in the middle."""


@dataclass
class Application:
    """An application like vLLM's, in front of a worker that says `text`, a letter for each token.

    `goes`: set, or a token is not made. `fails`: called before each token, with its position.
    """

    text: str = TEXT
    survival: Survival = field(default_factory=lambda: Survival(Fidelity.EXACT))
    goes: asyncio.Event = field(default_factory=asyncio.Event)
    fails: Callable[[int], None] = lambda _: None
    prompt: list[int] = field(default_factory=lambda: [1, 2])
    calls: int = 0
    _ids: Any = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.goes.set()

    async def __call__(self, asked: Scope, receive: Receive, send: Send) -> None:
        self.calls += 1
        fields = json.loads((await receive())["body"])
        assert fields["stream"]
        assert not {"background", "previous_response_id"} & set(fields)
        if fields.get("temperature", 0) > 2:
            body = json.dumps({"error": {"message": "temperature", "type": "", "param": None, "code": 400}}).encode()
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": body})
            return
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._answer(fields, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _answer(self, fields: dict[str, Any], send: Send) -> None:
        answer, item = fields["request_id"], f"msg_{next(self._ids)}"

        async def tell(kind: str, **more: Any) -> None:
            data = json.dumps({"type": kind, "sequence_number": -1, **more})
            await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})

        def response(status: str, *output: Any) -> dict[str, Any]:
            return {"id": answer, "created_at": next(self._ids), "status": status, "output": list(output)}

        begun = response("in_progress")
        await tell("response.created", response=begun)
        await tell("response.in_progress", response=begun)
        await tell("response.output_item.added", item={"id": item})
        async for part in self._parts(answer):
            await tell("response.output_text.delta", item_id=item, delta=part)
        done = {"id": item, "text": self.text}
        await tell("response.output_item.done", item=done)
        await tell("response.completed", response=response("completed", done))

    async def _parts(self, answer: str) -> AsyncIterator[str]:
        recording = current_recording()
        assert recording is not None
        request = Request(answer, self.prompt, lambda *_: b"", 0.0, survival=self.survival)
        if recording.begin(request, "") is not None:
            raise CutOffError
        known = sum(len(delta.token_ids) for delta in recording.before)
        if known:
            # Made again in one piece, as vLLM joins what comes at once.
            yield self.text[:known]
        for position in range(known, len(self.text)):
            await self.goes.wait()
            self.fails(position)
            last = position == len(self.text) - 1
            recording.take(TokenDelta(answer, 1, position, [position], finish="stop" if last else None))
            yield self.text[position]

    def fail(self, position: int, why: str, fault: Fault | None = None) -> None:
        """Have the request fail at this token, once."""
        whole = self.fails

        def fails(now: int) -> None:
            recording = current_recording()
            if now == position and recording is not None:
                self.fails = whole
                recording.take(TokenDelta("", 1, 0, [], finish="error", error=why, fault=fault))
                raise CutOffError

        self.fails = fails


class Frontend:
    """A frontend that keeps answers, with one model."""

    def __init__(
        self,
        root: Path,
        application: Application,
        disk: FullDisk | None = None,
        keys: Sequence[str] = KEYS,
        **limits: Any,
    ) -> None:
        self.tasks = TaskGuard()
        self.application = application
        self.unready: str | None = None
        folder = AnswerFolder(StatePaths(root, "n"), disk or FullDisk())
        self.answers = Answers(folder, replace(AnswerLimits(), **limits), self.tasks)
        entry = ModelEntry(["m"], lambda: self.unready, AdmissionLimits(hold_timeout_s=0), application)
        rest = AnswersRest(self.answers, lambda: self.answers.is_closing)
        self.gate = HttpGate(
            application,
            limits=AdmissionLimits(),
            models=ModelTable([entry]),
            is_draining=lambda: self.answers.is_closing,
            api_keys=keys,
            administration=Administration(keys[1:]),
            stores={RESPONSES: rest},
            answers=rest,
        )
        self.answers.connect(self.gate.answer_kept, self.gate.caller_for)

    async def start(self) -> Frontend:
        await self.answers.start()
        return self

    async def ask(
        self, path: str = "", method: str = "POST", key: str = "alice", leaves: asyncio.Event | None = None, **body: Any
    ) -> Answer:
        where, _, query = path.partition("?")
        asked = scope(f"/v1/responses{where}", method, [("Authorization", f"Bearer {key}")])
        asked["query_string"] = query.encode()
        async with asyncio.timeout(PATIENCE_S):
            return await call(self.gate, asked, [json.dumps(body).encode()], leaves=leaves)

    async def begin(self, **more: Any) -> str:
        answer = await self.ask(model="m", input="x", background=True, **more)
        assert answer.status == 200, answer.body
        return str(json.loads(answer.body)["id"])

    async def show(self, answer: str, key: str = "alice") -> dict[str, Any]:
        found = await self.ask(f"/{answer}", "GET", key)
        assert found.status == 200, found.body
        return dict(json.loads(found.body))

    async def follow(self, answer: str, after: int = -1) -> list[dict[str, Any]]:
        """All events behind that number, until the end."""
        return events_of(await self.ask(f"/{answer}?stream=true&starting_after={after}", "GET"))

    async def close(self) -> None:
        await self.answers.close()
        await self.tasks.close()


def events_of(answer: Answer) -> list[dict[str, Any]]:
    lines = [line for line in answer.body.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line[6:]) for line in lines]


def told(events: list[dict[str, Any]]) -> str:
    return "".join(event.get("delta", "") for event in events)


def whole(events: list[dict[str, Any]], text: str = TEXT) -> bool:
    numbers = [event["sequence_number"] for event in events]
    return told(events) == text and numbers == list(range(len(events))) and events[-1]["type"] == "response.completed"


Start = Callable[..., Any]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    frontends: list[Frontend] = []

    async def begin(application: Application, **more: Any) -> Frontend:
        frontends.append(Frontend(tmp_path, application, **more))
        return await frontends[-1].start()

    yield begin
    for frontend in frontends:
        await frontend.close()


def at(position: int, application: Application) -> Callable[[int], None]:
    """Has the application stop before this token."""

    def fails(now: int) -> None:
        if now == position:
            application.goes.clear()

    return fails


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def seen(frontend: Frontend, answer: str, letters: int) -> list[dict[str, Any]]:
    """The events that a client gets until it has seen so many letters, and leaves."""
    leaves, found = asyncio.Event(), Answer()
    asked = scope(f"/v1/responses/{answer}", "GET", [("Authorization", "Bearer alice")], query_string=b"stream=true")
    reading = asyncio.create_task(call(frontend.gate, asked, leaves=leaves, answer=found))
    await until(lambda: len(told(events_of(found))) >= letters)
    leaves.set()
    await reading
    return events_of(found)


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
        ({"prompt": [9]}, "its model or its chat template has changed"),
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
