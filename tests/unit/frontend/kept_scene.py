"""A frontend that keeps answers, in front of an application like vLLM's."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from components.frontend.answers.answers import Answers
from components.frontend.answers.rest import AnswersRest
from components.frontend.http.gate import Administration, HttpGate
from components.frontend.http.models import ModelEntry, ModelTable
from components.frontend.http.usage import UsageMeter
from components.frontend.request_context import request_here, tally_of
from components.frontend.settings import AnswerLimits
from dynamo_local.core.http.asgi import Receive, Scope, Send
from dynamo_local.core.http.bounds.admission import AdmissionLimits
from dynamo_local.core.http.paths import RESPONSES
from dynamo_local.core.messages.work import Fault, TokenDelta
from dynamo_local.core.ports import Request
from dynamo_local.core.request.recovery import Fidelity, Survival
from dynamo_local.core.usage.records import Tally, UsageRecord
from dynamo_local.tasks import TaskGuard, unless
from state.answers.folder import AnswerFolder
from state.paths import StatePaths
from tests.unit.frontend.asgi_driver import Answer, call, disconnected, scope
from tests.unit.state.answers.disks import FullDisk

TEXT = "abcdefghij"
PATIENCE_S = 60.0

Start = Callable[..., Any]
"""Starts a frontend (the fixture `start`)."""

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
    vocabulary: str = ""
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
        if await unless(disconnected(receive), self._answer(fields, send, tally_of(asked))):
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _answer(self, fields: dict[str, Any], send: Send, tally: Tally) -> None:
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
        async for part in self._parts(answer, tally):
            await tell("response.output_text.delta", item_id=item, delta=part)
        tally.end()
        done = {"id": item, "text": self.text}
        await tell("response.output_item.done", item=done)
        await tell("response.completed", response=response("completed", done))

    async def _parts(self, answer: str, tally: Tally) -> AsyncIterator[str]:
        recording = request_here().recording
        assert recording is not None
        prompt = recording.prompt(self.prompt, self.vocabulary)
        request = Request(answer, prompt, lambda *_: b"", 0.0, survival=self.survival)
        if recording.begin(request, "") is not None:
            raise CutOffError
        known = sum(len(delta.token_ids) for delta in recording.before)
        tally.begin()
        if known:
            tally.add("", len(prompt), 1, known)
            # Made again in one piece, as vLLM joins what comes at once.
            yield self.text[:known]
        for position in range(known, len(self.text)):
            await self.goes.wait()
            self.fails(position)
            last = position == len(self.text) - 1
            recording.take(TokenDelta(answer, 1, position, [position], finish="stop" if last else None))
            tally.add("", len(prompt), 1, 1)
            yield self.text[position]

    def fail(self, position: int, why: str, fault: Fault | None = None) -> None:
        """Have the request fail at this token, once."""
        whole = self.fails

        def fails(now: int) -> None:
            recording = request_here().recording
            if now == position and recording is not None:
                self.fails = whole
                recording.take(TokenDelta("", 1, 0, [], finish="error", error=why, fault=fault))
                raise CutOffError

        self.fails = fails


class Frontend:
    """A frontend that keeps answers, with one model, whose application is an ASGI application."""

    def __init__(
        self,
        root: Path,
        application: Any,
        disk: FullDisk | None = None,
        keys: Sequence[str] = KEYS,
        **limits: Any,
    ) -> None:
        self.tasks = TaskGuard()
        self.application = application
        self.unready: str | None = None
        folder = AnswerFolder(StatePaths(root, "n"), disk or FullDisk())
        self.answers = Answers(folder, replace(AnswerLimits(), **limits), self.tasks)
        self.used: list[UsageRecord] = []
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
            meter=UsageMeter(self.used.append),
        )
        self.answers.connect(self.gate.answer_kept, self.gate.caller_for)

    async def start(self) -> Frontend:
        await self.answers.start()
        return self

    async def ask(
        self, path: str = "", method: str = "POST", key: str = "alice", leaves: asyncio.Event | None = None, **body: Any
    ) -> Answer:
        where, _, query = path.partition("?")
        headers = [("Authorization", f"Bearer {key}"), ("Content-Type", "application/json")]
        asked = scope(f"/v1/responses{where}", method, headers)
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
