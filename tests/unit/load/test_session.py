"""Whole runs against a small server in this process."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from dynamo_local.core.errors import DynamoError
from dynamo_local.load.asked import Asked
from dynamo_local.load.client import Asking, Client, parse_url
from dynamo_local.load.connection import LoadError
from dynamo_local.load.runs import Run
from dynamo_local.load.session import Generator, SendCounts, run
from dynamo_local.load.workload import Alphabet, Planned, Prompts
from tests.unit.load.stub import Exchange, Stub, complete, serving

FAST = {"rate": "constant:1000", "input": "5-20", "output": "1-4"}


class Notes:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def progress(self, elapsed_s: float, counts: SendCounts) -> None:
        """Do nothing: no test looks at the progress."""


async def load(stub: Stub, environ: dict[str, str] | None = None, notes: Notes | None = None, **asked: Any) -> Run:
    """A load on the server; by default, twenty requests."""
    options = {"url": stub.url, "requests": 20, **asked}
    if not {"rate", "concurrency", "trace"} & asked.keys():
        options |= FAST
    async with asyncio.timeout(30):
        return await run(Asked(**options).settings(environ or {}), notes or Notes())


async def test_every_request_has_the_lengths_asked_for() -> None:
    async with serving(Stub()) as stub:
        found = await load(stub)
    assert found.figures.completed == 20
    assert found.settings["model"] == "tiny"
    asked = [(len(each.body["prompt"]), each.body["max_tokens"]) for each in stub.asked]
    assert sorted(asked) == sorted((each.input_tokens, each.output_tokens) for each in found.requests)
    assert all(each.tokens == each.output_tokens == len(each.chunks_s) for each in found.requests)
    assert all(each.prompt_tokens == each.input_tokens for each in found.requests)
    body = stub.asked[0].body
    assert (body["model"], body["stream"], body["ignore_eos"], body["temperature"]) == ("tiny", True, True, 0)
    assert {token for each in stub.asked for token in each.body["prompt"]} <= set(range(300, 340))


async def test_times_are_in_order() -> None:
    async with serving(Stub()) as stub:
        found = await load(stub)
    for each in found.requests:
        assert each.sent_s is not None
        assert each.ended_s is not None
        times = [each.at_s, each.sent_s, *each.chunks_s, each.ended_s]
        assert times == sorted(times)
    assert [each.at_s for each in found.requests] == [index / 1000 for index in range(20)]


async def test_the_same_seed_asks_the_same() -> None:
    prompts = []
    for seed in (1, 1, 2):
        async with serving(Stub()) as stub:
            await load(stub, seed=seed)
            prompts.append(sorted(str(each.body["prompt"]) for each in stub.asked))
    assert prompts[0] == prompts[1] != prompts[2]


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    everything_is_there = asyncio.Event()

    async def hold_back(exchange: Exchange) -> None:
        if len(stub.asked) == 20:
            everything_is_there.set()
        await everything_is_there.wait()
        await complete(exchange)

    async with serving(Stub(hold_back)) as stub:
        found = await load(stub)
    assert found.figures.completed == found.figures.most_at_once == 20


async def test_what_exceeds_the_cap_is_not_sent_and_fails() -> None:
    all_are_planned = asyncio.Event()

    def twenty() -> Iterator[Planned]:
        yield from [Planned(0.0, 5, 1)] * 20
        all_are_planned.set()

    async def hold_back(exchange: Exchange) -> None:
        await all_are_planned.wait()
        await complete(exchange)

    async with serving(Stub(hold_back)) as stub:
        endpoint = parse_url(stub.url)
        prompts = Prompts(Alphabet(range(9), 0), 0)
        client = Client(endpoint, Asking("tiny", False, True, {}))
        generator = Generator(client, prompts, max_in_flight=3)
        async with asyncio.timeout(30):
            await generator.open_loop(twenty())
    assert [record.error for record in generator.records] == [""] * 3 + ["not sent"] * 17
    assert len(stub.asked) == generator.counts.sent == generator.counts.completed == 3


async def test_a_closed_loop_has_so_many_under_way_and_reuses_their_connections() -> None:
    streams_are_there = asyncio.Event()

    async def hold_back(exchange: Exchange) -> None:
        if len(stub.asked) == 4:
            streams_are_there.set()
        await streams_are_there.wait()
        await complete(exchange)

    async with serving(Stub(hold_back)) as stub:
        found = await load(stub, concurrency=4, output="1-3")
    assert found.figures.completed == 20
    assert found.figures.most_at_once == 4
    assert found.figures.lag_s is None
    assert stub.connections == 4


async def refuse(exchange: Exchange) -> None:
    exchange.whole("429 Too Many Requests", {"error": {"message": "slow down"}})


async def hang_up_before(exchange: Exchange) -> None:
    exchange.writer.close()


async def hang_up_within(exchange: Exchange) -> None:
    exchange.stream()
    exchange.tokens(1)
    exchange.writer.close()


async def fail_within(exchange: Exchange) -> None:
    exchange.stream()
    exchange.tokens(1)
    exchange.event({"error": {"message": "the worker is gone"}})
    exchange.writer.write(b"0\r\n\r\n")


async def end_too_soon(exchange: Exchange) -> None:
    exchange.stream()
    exchange.tokens(1)
    exchange.writer.write(b"0\r\n\r\n")


async def talk_nonsense(exchange: Exchange) -> None:
    exchange.writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")


async def say_nothing(exchange: Exchange) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("respond", "kind", "says"),
    [
        (refuse, "HTTP 429", "slow down"),
        (hang_up_before, "disconnected", "closed by the server"),
        (hang_up_within, "disconnected", "closed by the server"),
        (fail_within, "error in the stream", "the worker is gone"),
        (end_too_soon, "broken off", "without an end"),
        (talk_nonsense, "bad answer", "not HTTP/1.1"),
        (say_nothing, "timeout", "no end within 1 s"),
    ],
)
async def test_failures_are_told_apart_and_leave_the_others_alone(respond: Any, kind: str, says: str) -> None:
    numbers = itertools.count()

    async def every_other(exchange: Exchange) -> None:
        await (respond if next(numbers) % 2 else complete)(exchange)

    timeout = "1s" if kind == "timeout" else "30s"
    async with serving(Stub(every_other)) as stub:
        found = await load(stub, concurrency=1, requests=4, timeout=timeout, output="2")
    assert [each.error for each in found.requests] == ["", kind, "", kind]
    assert says in found.requests[1].detail
    assert found.figures.errors == {kind: 2}
    assert found.figures.completed == 2


async def test_a_body_without_a_length_ends_with_its_connection() -> None:
    async def old_fashioned(exchange: Exchange) -> None:
        exchange.head("200 OK", "Connection: close")
        exchange.writer.write(b'data: {"choices":[{"text":"a","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n')
        exchange.writer.close()

    async with serving(Stub(old_fashioned)) as stub:
        found = await load(stub, requests=3)
    assert found.figures.completed == 3
    assert "did not count tokens" in "\n".join(found.notes)


async def test_a_chat_is_asked_with_text() -> None:
    async def chat(exchange: Exchange) -> None:
        exchange.stream()
        for fields in ({"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}):
            exchange.event({"choices": [{"delta": fields, "finish_reason": None}]})
        exchange.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        exchange.event("[DONE]")
        exchange.writer.write(b"0\r\n\r\n")

    async with serving(Stub(chat)) as stub:
        found = await load(stub, chat=True, requests=2, rate="constant:1000", input="7", ignore_eos=False)
    assert {each.path for each in stub.asked} == {"/v1/chat/completions"}
    (message,) = stub.asked[0].body["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 7
    assert "ignore_eos" not in stub.asked[0].body
    assert [each.tokens for each in found.requests] == [2, 2]


async def test_more_fields_and_the_key_are_sent_and_the_key_is_not_saved() -> None:
    async with serving(Stub()) as stub:
        found = await load(stub, {"OPENAI_API_KEY": "hush"}, body='{"temperature": 1, "priority": 3}', requests=1)
    assert stub.asked[0].headers["authorization"] == "Bearer hush"
    assert (stub.asked[0].body["temperature"], stub.asked[0].body["priority"]) == (1, 3)
    assert "hush" not in str(found)


async def test_without_the_servers_tokens_those_are_taken_that_every_model_has() -> None:
    notes = Notes()
    async with serving(Stub(tokenize=None)) as stub:
        await load(stub, notes=notes)
    assert {token for each in stub.asked for token in each.body["prompt"]} <= set(range(100, 1000))
    assert "taking 100 to 999" in notes.said[0]


async def test_the_vocabulary_may_be_given() -> None:
    async with serving(Stub(tokenize=None)) as stub:
        await load(stub, vocab="7-9", notes=(notes := Notes()))
    assert {token for each in stub.asked for token in each.body["prompt"]} == {7, 8, 9}
    assert notes.said == []


async def test_requests_that_are_too_long_are_told_before() -> None:
    notes = Notes()
    async with serving(Stub()) as stub:
        await load(stub, notes=notes, requests=1, rate="100", input="4000", output="97")
    assert "needs 4097 tokens, the model takes 4096" in notes.said[0]


@pytest.mark.parametrize(
    ("models", "asked", "says"),
    [
        (("401 Unauthorized", {"error": "no"}), {}, "HTTP 401: no; give the key"),
        (("200 OK", {"data": []}), {}, "has no model at all; it has none"),
        (("200 OK", {"data": [{"id": "tiny"}]}), {"model": "huge"}, "has no model huge; it has tiny"),
        (("200 OK", b"<html>"), {}, "does not answer as OpenAI's API does"),
    ],
)
async def test_a_server_that_cannot_be_loaded_is_told_at_once(models: Any, asked: dict[str, Any], says: str) -> None:
    async with serving(Stub(models=models)) as stub:
        with pytest.raises(LoadError, match=says):
            await load(stub, **asked)


async def test_nobody_there() -> None:
    async with serving(Stub()) as stub:
        pass
    with pytest.raises(DynamoError, match="cannot connect"):
        await load(stub)


async def test_an_interruption_gives_what_there_is() -> None:
    numbers = itertools.count(1)

    async def interrupt(exchange: Exchange) -> None:
        if next(numbers) <= 5:
            await complete(exchange)
        else:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()

    async with serving(Stub(interrupt)) as stub:
        found = await load(stub, concurrency=1, requests=None, duration="1h")
    assert found.interrupted
    assert (found.figures.completed, found.figures.cut_off, found.figures.failed) == (5, 1, 0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
