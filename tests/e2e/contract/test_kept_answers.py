"""Answers that are kept, with vLLM's own application: what it makes again of tokens is what it made before."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

import msgspec
import pytest

from components.frontend.answers.answers import Answers
from components.frontend.answers.kept_log import Recording
from components.frontend.answers.rest import AnswersRest
from components.frontend.http.gate import HttpGate
from components.frontend.http.models import ModelEntry, ModelTable
from components.frontend.request_context import request_here
from components.frontend.settings import AnswerLimits
from dynamo_local.core.http.bounds.admission import AdmissionLimits
from dynamo_local.core.http.paths import RESPONSES
from dynamo_local.core.messages.work import TokenDelta
from dynamo_local.core.ports import Outputs, Request
from dynamo_local.core.request.recovery import Fidelity, Survival
from dynamo_local.tasks import TaskGuard
from state.answers.folder import AnswerFolder
from state.paths import StatePaths
from tests.e2e.llm_server import PATIENCE_S
from tests.unit.frontend.asgi_driver import Answer, call, scope

pytest.importorskip("vllm", reason="vLLM is not installed")

from transformers import AutoTokenizer

from dynamo_local.engine.vllm.frontend.application import ModelApplication
from dynamo_local.model.named.random_model import random_model

THOUGHT = "<think>I think so, 🙂 twice.</think>"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TIMED = "{{ strftime_now('%H:%M:%S.%f') }}{% for message in messages %}{{ message.content }}{% endfor %}"
"""A chat template that renders another prompt each time."""
TOOL = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


class Script:
    """A dispatcher whose worker says these tokens, and stops before one of them until it may go on."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.stops_at = len(tokens)
        self.prompts: set[tuple[int, ...]] = set()
        self._outputs: asyncio.Queue[Outputs] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, request: Request) -> None:
        self.prompts.add(tuple(request.prompt_token_ids))
        recording = request_here().recording
        if recording is not None:
            assert recording.begin(msgspec.structs.replace(request, survival=Survival(Fidelity.EXACT)), "") is None
        task = asyncio.create_task(self._say(request.request_id, recording))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _say(self, name: str, recording: Recording | None) -> None:
        known = [] if recording is None else [replace_id(delta, name) for delta in recording.before]
        for delta in known:
            self._outputs.put_nowait(Outputs(time.monotonic(), (delta,)))
        for position in range(sum(len(delta.token_ids) for delta in known), self.stops_at):
            finish: Any = "stop" if position + 1 == len(self.tokens) else None
            delta = TokenDelta(name, 1, position, [self.tokens[position]], finish=finish)
            if recording is not None:
                recording.take(delta)
            self._outputs.put_nowait(Outputs(time.monotonic(), (delta,)))
            await asyncio.sleep(0)

    async def cancel(self, request_ids: Collection[str]) -> None:
        return

    async def outputs(self) -> Outputs:
        return await self._outputs.get()


def replace_id(delta: TokenDelta, name: str) -> TokenDelta:
    return TokenDelta(name, 1, delta.position, delta.token_ids, finish=delta.finish)


class Frontend:
    """A frontend of this application."""

    def __init__(self, root: Path, application: ModelApplication) -> None:
        self.tasks = TaskGuard()
        self.answers = Answers(AnswerFolder(StatePaths(root, "n")), AnswerLimits(), self.tasks)
        rest = AnswersRest(self.answers, lambda: self.answers.is_closing)
        entry = ModelEntry(["m"], lambda: None, AdmissionLimits(), application)
        self.gate = HttpGate(
            application,
            limits=AdmissionLimits(),
            models=ModelTable([entry]),
            is_draining=lambda: self.answers.is_closing,
            stores={RESPONSES: rest},
            answers=rest,
        )
        self.answers.connect(self.gate.answer_kept, self.gate.caller_for)

    async def ask(self, method: str, path: str = "", leaves: asyncio.Event | None = None, **body: Any) -> Answer:
        where, _, query = path.partition("?")
        headers = [("content-type", "application/json")]
        asked = scope(f"{RESPONSES}{where}", method, headers, query_string=query.encode())
        async with asyncio.timeout(PATIENCE_S):
            answer = await call(self.gate, asked, [json.dumps(body).encode()], leaves=leaves)
        assert answer.status == 200, answer.body
        return answer

    async def close(self) -> None:
        await self.answers.close()
        await self.tasks.close()


def events_of(answer: Answer) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in answer.body.split(b"\n") if line.startswith(b"data: ")]


@pytest.fixture
async def spoken(tmp_path: Path) -> AsyncIterator[tuple[ModelApplication, Script]]:
    path = str(random_model())
    tokens = AutoTokenizer.from_pretrained(path).encode(THOUGHT + CALL, add_special_tokens=False)
    script = Script(tokens)
    given = {"model": path, "max-model-len": 2048, "served-model-name": ["m"], "reasoning-parser": "qwen3"}
    parsers = {"tool-call-parser": "hermes", "enable-auto-tool-choice": True, "chat-template": TIMED}
    application = ModelApplication({**given, **parsers}, tmp_path, script)
    await application.start(lambda _: None)
    yield application, script
    await application.close()


async def test_thoughts_and_calls_of_tools_go_on_in_the_middle(
    spoken: tuple[ModelApplication, Script], tmp_path: Path
) -> None:
    application, script = spoken
    asked: dict[str, Any] = {"model": "m", "input": "x", "tools": [TOOL], "background": True}
    whole: list[dict[str, Any]] | None = None
    # The first is undisturbed.
    for stops_at in (len(script.tokens), 5, len(script.tokens) // 2, len(script.tokens) - 5):
        script.stops_at = stops_at
        script.prompts.clear()
        first = Frontend(tmp_path, application)
        await first.answers.start()
        begun = json.loads((await first.ask("POST", **asked)).body)["id"]
        running = first.answers.running(begun)
        async with asyncio.timeout(PATIENCE_S):
            while running is not None and not running.has_ended and running.tokens < stops_at:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await first.close()
        script.stops_at = len(script.tokens)
        second = Frontend(tmp_path, application)
        await second.answers.start()
        events = events_of(await second.ask("GET", f"/{begun}?stream=true"))
        await second.close()
        assert events[-1]["type"] == "response.completed", events[-1]
        (prompt,) = script.prompts
        assert events[-1]["response"]["usage"]["input_tokens"] == len(prompt)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        output = [{**item, "id": "", "call_id": ""} for item in events[-1]["response"]["output"]]
        whole = whole or output
        assert output == whole
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == events[-1]["response"]["output"]
    assert whole is not None
    assert [item["type"] for item in whole] == ["reasoning", "function_call"]
    assert json.loads(whole[1]["arguments"]) == {"a": 1, "b": 2}


async def test_an_answer_that_is_not_kept_goes_on_from_one_that_is(
    spoken: tuple[ModelApplication, Script], tmp_path: Path
) -> None:
    application, script = spoken
    frontend = Frontend(tmp_path, application)
    await frontend.answers.start()
    first = json.loads((await frontend.ask("POST", model="m", input="x", tools=[TOOL], store=True)).body)["id"]
    result = {"type": "function_call_output", "call_id": "c", "output": "3"}
    asked = {"model": "m", "input": [result], "tools": [TOOL], "previous_response_id": first, "store": "false"}
    script.prompts.clear()
    answer = json.loads((await frontend.ask("POST", **asked)).body)
    assert (answer["previous_response_id"], answer["status"]) == (first, "completed")
    events = events_of(await frontend.ask("POST", **asked, stream=True))
    told = [event["response"]["previous_response_id"] for event in events if "response" in event]
    assert (len(told) > 2, set(told)) == (True, {first})
    assert len(list(frontend.answers.folder.path.rglob("resp_*"))) == 1
    await frontend.close()
