"""Answers in the background on `dynamo serve`, with vLLM's API and mockers for engines, seen by the `openai` client:
whatever is killed, they are those of an undisturbed server, and each number stays that of its event."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from tests.integration.frontend.answer_events import events_after, text_of
from tests.integration.server_process import PATIENCE_S, ServerProcess, eventually

pytestmark = pytest.mark.integration

NAMESPACE = "answers"
TOKENS = 250
SEEN = 20
"""Events that a client has before something is killed."""
PROMPTS = ("one", "two", "three")


class AnswerServer:
    """A server that can be killed and started again, at the same address."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._port = 0
        self.process = self._start()

    def _start(self) -> ServerProcess:
        arguments = ["-m", "dynamo_local.cli.main", "serve", "random", "--workers=2", "--cpu-slots=2"]
        arguments += ["--VllmWorker.engine=mocker", "--VllmWorker.mocker-step-base-ms=20"]
        arguments += [f"--namespace={NAMESPACE}", f"--port={self._port}"]
        server = ServerProcess(self._root, NAMESPACE, arguments)
        try:
            line = server.line("API ready at", within_s=2 * PATIENCE_S)
        except BaseException:
            server.__exit__()
            raise
        (url,) = [word for word in line.split() if word.startswith("http://")]
        self._port = urlsplit(url).port or 0
        return server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    def kill(self, name: str) -> None:
        """Kill a process; the whole server is started again then."""
        if name != "serve":
            os.kill(self.process.pid(name), signal.SIGKILL)
            return
        self.close()
        self.process = self._start()

    def close(self) -> None:
        self.process.__exit__()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnswerServer]:
    server = AnswerServer(tmp_path_factory.mktemp("answers") / "state")
    yield server
    server.close()


@pytest.fixture(scope="module")
def client(server: AnswerServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="none", timeout=PATIENCE_S, max_retries=5)


def ask(client: openai.OpenAI, prompt: str, **more: Any) -> Any:
    extra = {"ignore_eos": True}
    return client.responses.create(
        model="random", input=prompt, background=True, max_output_tokens=TOKENS, extra_body=extra, **more
    )


@pytest.fixture(scope="module")
def undisturbed(client: openai.OpenAI) -> dict[str, str]:
    """The answers when nothing happens, without the background."""
    return {
        prompt: client.responses.create(
            model="random", input=prompt, max_output_tokens=TOKENS, extra_body={"ignore_eos": True}
        ).output_text
        for prompt in PROMPTS
    }


def test_an_answer_is_there_at_once_and_whole_when_it_is_done(
    client: openai.OpenAI, undisturbed: dict[str, str]
) -> None:
    answer = ask(client, "one")
    assert answer.status in ("queued", "in_progress")
    assert answer.background
    eventually(lambda: client.responses.retrieve(answer.id).status == "incomplete", "the end of an answer")
    whole = client.responses.retrieve(answer.id)
    assert whole.output_text == undisturbed["one"]
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None
    assert whole.usage.output_tokens == TOKENS
    events = events_after(client, answer.id)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert events[-1].type == "response.incomplete"
    assert text_of(events) == undisturbed["one"]
    assert [event.to_dict() for event in events_after(client, answer.id, 10)] == [one.to_dict() for one in events[11:]]
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.retrieve(answer.id)


def test_an_answer_that_is_cancelled_keeps_what_it_has(client: openai.OpenAI) -> None:
    stream = ask(client, "one", stream=True)
    events = [next(stream) for _ in range(SEEN)]
    answer = events[0].response.id
    cancelled = client.responses.cancel(answer)
    assert cancelled.status == "cancelled"
    assert client.responses.cancel(answer).status == "cancelled"
    rest = list(stream)
    assert rest[-1].type == "response.cancelled"
    assert len(text_of(events + rest)) > 0


async def test_conversations_go_on_from_answers_that_are_kept(server: AnswerServer) -> None:
    client = openai.AsyncOpenAI(base_url=server.url, api_key="none", timeout=PATIENCE_S)
    more: dict[str, Any] = {"model": "random", "max_output_tokens": 8}
    first = await client.responses.create(input="one", store=True, **more)
    second = await client.responses.create(input="two", previous_response_id=first.id, **more)
    assert second.previous_response_id == first.id
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    listed = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=1)]
    assert [getattr(item, "role", None) for item in listed] == ["user", "assistant", "user"]
    streamed = await client.responses.create(input="three", previous_response_id=second.id, stream=True, **more)
    last = [event async for event in streamed][-1]
    assert last.response.usage.input_tokens > second.usage.input_tokens
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(input="two", previous_response_id="resp_" + 32 * "0", **more)
    unkept = await client.responses.create(input="one", **more)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(unkept.id)
    await client.close()


@pytest.mark.parametrize(("wrong", "field"), [({"temperature": 99.0}, "temperature"), ({"store": False}, "store")])
def test_what_is_wrong_is_said_at_once_and_nothing_is_kept(
    client: openai.OpenAI, server: AnswerServer, wrong: dict[str, Any], field: str
) -> None:
    kept = list(server.process.paths.answers_dir.rglob("resp_*"))
    with pytest.raises(openai.BadRequestError, match=field):
        ask(client, "one", **wrong)
    assert list(server.process.paths.answers_dir.rglob("resp_*")) == kept


@pytest.mark.parametrize("victim", ["VllmWorker", "Frontend", "Nats", "serve"])
def test_whatever_is_killed_the_answer_is_the_same_and_so_is_each_event(
    server: AnswerServer, client: openai.OpenAI, undisturbed: dict[str, str], victim: str
) -> None:
    answers = {prompt: ask(client, prompt).id for prompt in PROMPTS}
    before = {prompt: events_after(client, answer, most=SEEN) for prompt, answer in answers.items()}
    server.kill(victim)
    for prompt, answer in answers.items():
        after = events_after(client, answer, before[prompt][-1].sequence_number)
        told = before[prompt] + after
        assert [event.sequence_number for event in told] == list(range(len(told)))
        assert told[-1].type == "response.incomplete", told[-1]
        assert text_of(told) == undisturbed[prompt]
        # Whoever asks for all of it later gets the same.
        assert [event.to_dict() for event in events_after(client, answer)] == [event.to_dict() for event in told]
        assert client.responses.retrieve(answer).output_text == undisturbed[prompt]
