"""The interactive chat against an API of the test's own: history, commands, interruptions, errors."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from dynamo_local.chat.client import ChatClient, ChatError, Part, Sampling, reader
from dynamo_local.chat.servers import Served, choose
from dynamo_local.chat.session import Session
from dynamo_local.core.conversation import COMMANDS, Conversation
from dynamo_local.core.errors import NotRunningError, UsageError
from dynamo_local.load.client import parse_url
from tests.unit.load.stub import Exchange, Respond, Stub, serving


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def finish(exchange: Exchange) -> None:
    exchange.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    exchange.event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
    exchange.event("[DONE]")
    exchange.writer.write(b"0\r\n\r\n")


async def hello(exchange: Exchange) -> None:
    exchange.stream()
    exchange.event(delta(role="assistant", content=""))
    exchange.event(delta(reasoning="Hm."))
    exchange.event(delta(content="Hello, "))
    exchange.event(delta(content="you"))
    finish(exchange)


async def too_long(exchange: Exchange) -> None:
    exchange.whole("400 Bad Request", {"error": {"message": "the context is too long"}})


async def breaks_off(exchange: Exchange) -> None:
    exchange.stream()
    exchange.event(delta(content="Hel"))
    exchange.writer.write(b"0\r\n\r\n")


async def fails_in_the_stream(exchange: Exchange) -> None:
    exchange.stream()
    exchange.event({"error": {"message": "no worker is left", "code": 503}})
    exchange.writer.write(b"0\r\n\r\n")


async def never_ends(exchange: Exchange) -> None:
    exchange.stream()
    exchange.event(delta(content="Once upon"))


@contextmanager
def api(respond: Respond = hello) -> Iterator[Stub]:
    """The API in a thread, as the session runs its own event loop."""
    stub, started, ended = Stub(respond), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with serving(stub):
            started.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert started.wait(10)
    yield stub
    loop.call_soon_threadsafe(ended.set)
    thread.join(10)
    loop.close()


@dataclass
class Script:
    """A screen whose user types these lines; an exception stands for Ctrl-C or the end of the input."""

    lines: list[str | type[BaseException]]
    on_part: Callable[[Part], None] = lambda part: None
    shown: list[Part] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    answers: int = 0

    def read(self) -> str:
        line = self.lines.pop(0) if self.lines else EOFError
        if isinstance(line, str):
            return line
        raise line

    def show(self, part: Part) -> None:
        self.shown.append(part)
        self.on_part(part)

    def end_answer(self) -> None:
        self.answers += 1

    def note(self, text: str) -> None:
        self.notes.append(text)


def chat(stub: Stub, script: Script, *, is_verbose: bool = False, system: str | None = None) -> bool:
    client = ChatClient(parse_url(stub.url), "tiny", Sampling(max_tokens=7, temperature=0.5))
    return Session(client, script, Conversation(system), is_verbose=is_verbose).run()


def asked(stub: Stub) -> list[list[tuple[str, str]]]:
    """Role and text of the messages of each request."""
    return [[(each["role"], each["content"]) for each in exchange.body["messages"]] for exchange in stub.asked]


def test_what_was_said_is_sent_along_and_reasoning_is_not() -> None:
    script = Script(["Hi", "", "And?", "/clear", "New", "/system Be brief", "More", "/exit", "never read"])
    with api() as stub:
        assert chat(stub, script) is False
        assert asked(stub) == [
            [("user", "Hi")],
            [("user", "Hi"), ("assistant", "Hello, you"), ("user", "And?")],
            [("user", "New")],
            [("system", "Be brief"), ("user", "New"), ("assistant", "Hello, you"), ("user", "More")],
        ]
        sent = stub.asked[0].body
        assert (sent["model"], sent["max_tokens"], sent["temperature"], sent["stream"]) == ("tiny", 7, 0.5, True)
        assert stub.connections == 1
    assert script.shown[:3] == [Part("Hm.", is_reasoning=True), Part("Hello, "), Part("you")]
    assert script.lines == ["never read"]


def test_commands_are_listed_and_unknown_ones_noticed() -> None:
    script = Script(["/help", "/nosuch"])
    with api() as stub:
        chat(stub, script)
        assert stub.asked == []
    assert all(any(name in note for note in script.notes) for name in COMMANDS)
    assert any("no command /nosuch" in note for note in script.notes)


def test_an_answer_that_is_interrupted_is_kept_as_far_as_it_was_shown() -> None:
    script = Script(["Tell", "Go on"], on_part=lambda part: signal.raise_signal(signal.SIGINT))
    with api(never_ends) as stub:
        assert chat(stub, script) is False
        assert asked(stub)[1] == [("user", "Tell"), ("assistant", "Once upon"), ("user", "Go on")]
    assert script.answers == 2


def test_ctrl_c_twice_ends_the_chat_and_a_question_between_counts_anew() -> None:
    with api() as stub:
        script = Script([KeyboardInterrupt, "Hi", KeyboardInterrupt, KeyboardInterrupt, "never read"])
        assert chat(stub, script) is True
        assert len(stub.asked) == 1
    assert script.lines == ["never read"]
    assert script.notes == ["Ctrl-C again, Ctrl-D or /exit ends the chat"] * 2


def test_ctrl_c_in_an_answer_and_then_at_the_prompt_ends_the_chat() -> None:
    script = Script(["Tell", KeyboardInterrupt, "never read"], on_part=lambda _: signal.raise_signal(signal.SIGINT))
    with api(never_ends) as stub:
        assert chat(stub, script) is True
    assert script.lines == ["never read"]


@pytest.mark.parametrize(
    ("respond", "error"),
    [
        (too_long, "the context is too long"),
        (breaks_off, "the answer broke off"),
        (fails_in_the_stream, "no worker is left"),
    ],
)
def test_a_question_that_fails_is_not_kept_and_the_chat_goes_on(respond: Respond, error: str) -> None:
    script = Script(["Hi", "Still there?"])
    with api(respond) as stub:
        assert chat(stub, script) is False
        assert asked(stub)[1] == [("user", "Still there?")]
    assert next(note for note in script.notes if note.startswith("error: ")).startswith(f"error: {error}")


def test_figures_are_told_if_wanted() -> None:
    script = Script(["Hi"])
    with api() as stub:
        chat(stub, script, is_verbose=True)
    assert script.notes[-1].startswith("3 prompt tokens, 2 tokens in ")


async def test_a_missing_key_is_said_with_its_remedy() -> None:
    async def refuse(exchange: Exchange) -> None:
        exchange.whole("401 Unauthorized", {"error": "Unauthorized"})

    async with serving(Stub(refuse)) as stub:
        client = ChatClient(parse_url(stub.url), "tiny", Sampling())
        with pytest.raises(ChatError, match="give the key with --api-key-file, DYN_API_KEY or OPENAI_API_KEY"):
            async for _ in client.stream(Conversation().asked("Hi"), reader()):
                pass
        with pytest.raises(ChatError, match="Unauthorized"):
            await client.whole(Conversation().asked("Hi"))
        client.close()


SERVERS = [Served("a", "http://a", ("x", "/models/y")), Served("b", "http://b", ("z",))]


def test_the_server_of_the_model_is_chosen() -> None:
    assert choose(SERVERS, "z") == ("http://b", "z")
    assert choose(SERVERS, "/models/y") == ("http://a", "/models/y")
    assert choose(SERVERS, "nosuch") is None
    assert choose(SERVERS[1:], None) == ("http://b", "z")


def test_without_a_model_only_one_server_may_run() -> None:
    with pytest.raises(NotRunningError, match="no server runs; name a model"):
        choose([], None)
    with pytest.raises(UsageError, match=r"2 servers run: x \(namespace a\), z \(namespace b\); name the model"):
        choose(SERVERS, None)
