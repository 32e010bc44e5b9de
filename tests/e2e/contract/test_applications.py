"""vLLM's applications of several models in one process: each answers for its own model, is counted under its own name,
and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from components.frontend.http.gate import HttpGate
from components.frontend.http.models import ModelEntry, ModelTable
from components.frontend.http.usage import UsageMeter
from dynamo_local.core.errors import EngineError
from dynamo_local.core.http.bounds.admission import AdmissionLimits
from dynamo_local.core.messages.endpoints import ServedAdapter
from dynamo_local.core.usage.records import UsageRecord

pytest.importorskip("vllm", reason="vLLM is not installed")

from prometheus_client import REGISTRY, generate_latest
from vllm.parser.metrics import record_tool_parser_invocation
from vllm.tokenizers.registry import cached_get_tokenizer

from dynamo_local.engine.vllm.patches.metrics import answering
from tests.e2e.contract.letter_models import Model
from tests.unit.frontend.asgi_driver import Answer, call, scope

Start = Callable[..., Any]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    async with AsyncExitStack() as models:

        async def start_one(name: str, letter: str = "A", **config: Any) -> Model:
            model = Model(name, letter, tmp_path, **config)
            models.push_async_callback(model.close)
            await model.application.start(lambda _: None)
            return model

        yield start_one


def shown() -> str:
    return generate_latest(REGISTRY).decode()


def value(series: str) -> float:
    """The value of a series, written as /metrics shows it."""
    (found,) = [line for line in shown().splitlines() if line.startswith(series)]
    return float(found.rpartition(" ")[2])


def generated(name: str) -> float:
    return value(f'vllm:generation_tokens_total{{engine="0",model_name="{name}"}}')


def models_counted() -> set[str]:
    found = [line for line in shown().splitlines() if line.startswith("vllm:generation_tokens_total{")]
    assert len(found) == len(set(found))
    return {line.partition('model_name="')[2].partition('"')[0] for line in found}


async def test_models_are_built_at_once_under_traffic_and_none_gets_anothers_tokens(start: Start) -> None:
    first = await start("first", "A")
    stop = asyncio.Event()
    texts: list[str] = []

    async def keep_asking() -> None:
        while not stop.is_set():
            texts.append(await first.says(50))

    asking = [asyncio.create_task(keep_asking()) for _ in range(4)]
    second, third = await asyncio.gather(start("second", "B"), start("third", "C"))
    during = len(texts)
    answers = await asyncio.gather(*(model.says(50) for model in (second, third) * 5))
    stop.set()
    await asyncio.gather(*asking)
    assert during > 0
    assert set(texts) == {"A" * 50}
    assert answers == ["B" * 50, "C" * 50] * 5
    for model, other in itertools.permutations((first, second, third), 2):
        refused = await model.client.post("/v1/completions", json={"model": other.name, "prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (404, "NotFoundError")


async def test_each_model_has_its_metrics_whichever_comes_and_goes(start: Start) -> None:
    one = await start("m-one", "A")
    await one.says(3)
    two = await start("m-two", "B")
    await two.says(5)
    await one.says(2)
    assert models_counted() == {"m-one", "m-two"}
    assert (generated("m-one"), generated("m-two")) == (5, 5)
    again = await start("m-two", "C")
    await again.says(4)
    assert generated("m-two") == 9
    families = Counter(line.split()[2] for line in shown().splitlines() if line.startswith("# TYPE"))
    assert set(families.values()) == {1}
    assert sum(name.startswith("vllm:") for name in families) > 20
    before = value('http_requests_total{handler="/v1/completions",method="POST",status="2xx"}')
    await two.says()
    assert value('http_requests_total{handler="/v1/completions",method="POST",status="2xx"}') == before + 1
    await one.close()
    assert models_counted() == {"m-two"}
    await again.close()
    assert generated("m-two") == 8
    await start("m-one", "A")
    assert models_counted() == {"m-one", "m-two"}
    assert generated("m-one") == 0


async def test_tool_calls_are_counted_for_the_model_that_answers(start: Start) -> None:
    parser = {"tool-call-parser": "hermes", "enable-auto-tool-choice": True}
    await start("t-one", **parser)
    await start("t-two", **parser)
    for name, times in (("t-one", 2), ("t-two", 1)):
        answering.set(name)
        for _ in range(times):
            record_tool_parser_invocation(is_tool_called=True, is_streaming=False, request=object())

    def counted(name: str) -> float:
        labels = f'mode="non_streaming",model_name="{name}",outcome="tool_call",request_type="other"'
        return value(f"vllm:tool_call_parser_invocations_total{{{labels}}}")

    assert (counted("t-one"), counted("t-two")) == (2, 1)
    await start("t-three")
    assert (counted("t-one"), counted("t-two")) == (2, 1)


async def test_adapters_come_and_go_while_the_model_answers(start: Start) -> None:
    model = await start("base", "A", **{"enable-lora": True})
    pirate, poet = ServedAdapter("pirate", "/adapters/pirate", "1.1"), ServedAdapter("poet", "/adapters/poet")
    await model.application.serve_adapters([pirate, poet])
    cards = {card["id"]: card for card in await model.application.cards()}
    assert list(cards) == ["base", "pirate", "poet"]
    assert (cards["pirate"]["parent"], cards["pirate"]["root"]) == ("base", "/adapters/pirate")
    assert await model.says(2, "pirate") == "AA"
    await model.application.serve_adapters([msgspec.structs.replace(pirate, version="2.1"), poet])
    assert await model.says(2, "pirate") == "AA"
    assert await model.says(2, "poet") == "AA"
    assert model.dispatcher.adapters == ["pirate@1.1", "pirate@2.1", "poet"]
    await model.application.serve_adapters([ServedAdapter("poet", "/elsewhere/poet", "3.1")])
    assert {card["id"]: card["root"] for card in await model.application.cards()}["poet"] == "/elsewhere/poet"
    gone = await model.client.post("/v1/completions", json={"model": "pirate", "prompt": "x"})
    assert gone.status_code == 404
    assert await model.says(2, "poet") == "AA"
    assert await model.says(2) == "AA"


async def test_a_model_that_cannot_be_built_disturbs_no_other(start: Start, tmp_path: Path) -> None:
    good = await start("good", "A")
    with pytest.raises(EngineError) as raised:
        await start("bad", model=str(tmp_path / "nothing"))
    assert "\n" not in str(raised.value)
    assert await good.says(2) == "AA"
    assert models_counted() == {"good"}


async def test_one_folder_is_loaded_once_however_many_models_have_it(start: Start) -> None:
    """vLLM's cache holds the tokenizer; each model's renderer copies it for its threads."""
    models = [await start("copy-0")]
    loaded = cached_get_tokenizer.cache_info().misses
    models += await asyncio.gather(start("copy-1"), start("copy-2"))
    assert cached_get_tokenizer.cache_info().misses == loaded
    for model in models:
        assert cached_get_tokenizer.cache_info().currsize == 1
        await model.close()
    assert cached_get_tokenizer.cache_info().currsize == 0, "a folder that nobody has any more may be changed"


async def test_models_that_end_are_freed(start: Start) -> None:
    """Without a search of the process for garbage, which takes the longer, the more models there are."""
    stays, ends = await start("stays", "A"), await start("ends", "B")
    assert await ends.says(2) == "BB"
    built = ends.application._built
    assert built is not None
    freed = {type(part).__name__: weakref.ref(part) for part in (built.app, built.llm, built.llm.input_processor)}
    freed["serving"] = weakref.ref(built.app.state.openai_serving_chat)
    del built
    gc.disable()
    try:
        await ends.close()
        async with asyncio.timeout(60):
            # The engine's own tasks, which were cancelled, end meanwhile.
            while any(part() is not None for part in freed.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        gc.enable()
    assert await stays.says(2) == "AA"


def running_threads() -> set[str]:
    """Names of this process's threads, but those of its event loop's own executor: it keeps them, up to a number."""
    return {thread.name for thread in threading.enumerate() if not thread.name.startswith("asyncio_")}


async def test_models_that_end_leave_no_threads(start: Start) -> None:
    async def once() -> None:
        model = await start("short", "A")
        assert await model.says(2) == "AA"
        # A long text has a thread of its own.
        assert (await model.client.post("/tokenize", json={"prompt": "ab " * 20_000})).status_code == 200
        await model.close()

    await once()
    before = running_threads()
    for _ in range(3):
        await once()
    async with asyncio.timeout(60):
        # Those of the last model end meanwhile.
        while running_threads() - before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert models_counted() == set()


class Held:
    """A gate before a model that has no worker yet."""

    def __init__(self, model: Model) -> None:
        self.why: str | None = "no worker is ready"
        self.application = model.application
        limits = AdmissionLimits()
        self.entry = ModelEntry([model.name], lambda: self.why, limits, model.application)
        table = ModelTable([self.entry])
        self.gate = HttpGate(model.application, limits=limits, models=table, is_draining=lambda: False)

    def ask(self, path: str, leaves: asyncio.Event | None = None, **fields: Any) -> asyncio.Task[Answer]:
        asked = scope(path, headers=[("content-type", "application/json")], query_string=b"", http_version="1.1")
        body = [json.dumps({"max_tokens": 3, "ignore_eos": True, **fields}).encode()]
        return asyncio.create_task(call(self.gate, asked, body, leaves=leaves))

    async def held(self, number: int) -> None:
        async with asyncio.timeout(60):
            while len(self.entry.line) != number:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    @property
    def known_to_vllm(self) -> int:
        built = self.application._built
        assert built is not None
        return len(built.llm.output_processor.request_states)


async def test_requests_are_examined_before_they_wait_and_go_on_as_they_are(start: Start) -> None:
    house = Held(await start("m", "A"))
    chat, completions = "/v1/chat/completions", "/v1/completions"
    turn = [{"role": "user", "content": "x"}]
    for wrong in ({"prompt": "x " * 9000}, {"prompt": "x", "temperature": -1}, {"prompt": [10**9]}):
        assert (await house.ask(completions, **wrong)).status == 400, wrong
    assert (await house.ask(chat, messages=turn, stream=True, top_p=7)).status == 400
    assert house.known_to_vllm == 0
    asked = [
        house.ask(completions, prompt="x"),
        house.ask(completions, prompt=["x", "y"], n=2),
        house.ask(chat, messages=turn),
        house.ask(chat, messages=turn, stream=True),
    ]
    leaves = asyncio.Event()
    left = house.ask(chat, leaves, messages=turn, n=3)
    await house.held(5)
    leaves.set()
    await left
    await house.held(4)
    house.why = None
    house.entry.look()
    one, many, whole, stream = await asyncio.gather(*asked)
    assert [choice["text"] for choice in json.loads(one.body)["choices"]] == ["AAA"]
    assert [choice["text"] for choice in json.loads(many.body)["choices"]] == ["AAA"] * 4
    assert json.loads(whole.body)["choices"][0]["message"]["content"] == "AAA"
    assert (stream.status, stream.body.count(b'"content":"A"')) == (200, 3)
    assert house.known_to_vllm == 0


class Metering:
    """A gate before a model, which notes what each request has used."""

    def __init__(self, model: Model) -> None:
        self.records: list[UsageRecord] = []
        application = model.application
        limits = AdmissionLimits()
        entry = ModelEntry([model.name], lambda: None, limits, application, application.paths)
        meter = UsageMeter(self.records.append)
        table = ModelTable([entry])
        self.gate = HttpGate(application, limits=limits, models=table, is_draining=lambda: False, meter=meter)

    async def ask(self, path: str, leaves: asyncio.Event | None = None, **body: Any) -> tuple[Answer, tuple[int, int]]:
        """Ask, and return the answer with the tokens of prompts and outputs that it was counted as."""
        asked = scope(path, headers=[("content-type", "application/json")], query_string=b"")
        answer = await call(self.gate, asked, [json.dumps(body).encode()], leaves=leaves)
        (record,) = self.records
        self.records.clear()
        return answer, (record.prompt, record.output)


def told_in(answer: Answer) -> tuple[int, int]:
    """The tokens of prompts and outputs that an answer tells, of whichever API: the last that it says of them."""
    parts = [line.removeprefix(b"data: ") for line in answer.body.splitlines() if line.startswith(b"data: {")]
    found: dict[str, int] = {}
    for each in map(json.loads, parts or [answer.body]):
        found |= (each.get("response") or each).get("usage") or {}
    prompt = found.get("prompt_tokens", found.get("input_tokens", 0))
    return prompt, found.get("completion_tokens", found.get("output_tokens", 0))


async def test_what_answers_tell_of_their_use_is_counted(start: Start) -> None:
    metering = Metering(await start("m", "A"))
    chat, completions, turn = "/v1/chat/completions", "/v1/completions", [{"role": "user", "content": "hello"}]
    streams = {"stream": True, "stream_options": {"include_usage": True}}
    always = {"continuous_usage_stats": True, "include_usage": True}
    for path, asked in (
        (completions, {"prompt": "x"}),
        (completions, {"prompt": ["x", "two words"], "n": 3, "max_tokens": 5}),
        (completions, {"prompt": ["x", "two words"], "n": 3, "max_tokens": 5, **streams}),
        (completions, {"prompt": "x", "stop": "AAA", "max_tokens": 9}),
        (completions, {"prompt": "x", "stop": "AAA", "max_tokens": 9, **streams}),
        (completions, {"prompt": "x", "echo": True, "max_tokens": 2}),
        (completions, {"prompt": "x", "max_tokens": 1, "stream": True, "stream_options": always}),
        (chat, {"messages": turn, "max_tokens": 4, "n": 2}),
        (chat, {"messages": turn, "max_tokens": 4, "n": 2, **streams}),
        ("/v1/chat/completions/batch", {"messages": [turn, turn], "max_tokens": 4}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 4}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 4, "stream": True}),
        ("/v1/messages", {"messages": turn, "max_tokens": 4}),
        ("/v1/messages", {"messages": turn, "max_tokens": 4, "stream": True}),
    ):  # fmt: skip
        answer, counted = await metering.ask(path, model="m", ignore_eos=True, **asked)
        assert answer.status == 200, answer.body
        assert (counted, min(counted) > 0) == (told_in(answer), True), asked

    answer, counted = await metering.ask(completions, model="m", prompt="x", max_tokens=3, ignore_eos=True, stream=True)
    assert (answer.body.count(b'"text":"A"'), counted) == (3, (2, 3))
    refused, counted = await metering.ask(completions, model="m", prompt="x", temperature=-1)
    assert (refused.status, counted) == (400, (0, 0))
    leaves = asyncio.Event()
    leaves.set()
    _, (prompt, output) = await metering.ask(completions, leaves, model="m", prompt="x", max_tokens=2000, stream=True)
    assert (prompt in (0, 2), output < 2000) == (True, True)


async def test_what_is_wrong_with_a_body_is_told_in_sentences_and_in_the_shape_of_the_api(start: Start) -> None:
    model = await start("m")
    entry = ModelEntry(["m"], lambda: None, AdmissionLimits(), model.application, model.application.paths)
    entry.vocabulary = model.application.vocabulary
    gate = HttpGate(model.application, limits=entry.limits, models=ModelTable([entry]), is_draining=lambda: False)

    async def ask(path: str, body: bytes = b"", **fields: Any) -> Answer:
        asked = scope(path, headers=[("content-type", "application/json")], query_string=b"")
        return await call(gate, asked, [body or json.dumps({"model": "m", **fields}).encode()])

    turn = [{"role": "user", "content": "x"}]
    for path, fields, why in (
        ("/v1/messages", {"messages": turn, "max_tokens": 0}, "max_tokens must be positive, got 0"),
        ("/v1/messages", {"messages": None, "max_tokens": 1}, "messages must be a list of messages, got null"),
        ("/v1/messages/count_tokens", {}, "messages: Field required"),
        ("/v1/chat/completions", {}, "messages: Field required"),
        ("/v1/chat/completions", {"messages": None}, "messages must be a list of messages, got null"),
        ("/v1/completions", {"prompt": "x", "temperature": "x" * 999}, 'as a number, got "' + 60 * "x" + '"'),
        ("/v1/responses", {"input": "x", "store": "maybe"}, 'unable to interpret input, got "maybe"'),
        ("/v1/responses", {"input": [{"a": n} for n in range(2000)]}, "; and more"),
        ("/detokenize", {"tokens": [65, 10**9]}, "token 1000000000 is not in the vocabulary, whose ids are 0 to 262"),
    ):
        answer = await ask(path, **fields)
        message = answer.error["message"]
        assert (answer.status, message.endswith(why), len(message) < 2000) == (400, True, True), message
    assert (await ask("/v1/messages", model="other")).error["type"] == "not_found_error"
    assert "the body is not JSON" in (await ask("/tokenize", b"{")).error["message"]
    assert (await ask("/detokenize", tokens=[65, 262])).status == 200


async def test_a_chat_template_that_cannot_be_read_fails_the_model_and_one_that_refuses_a_request_does_not(
    start: Start, tmp_path: Path
) -> None:
    # vLLM keeps templates by their paths.
    unended, unknown, refusing = (tmp_path / f"{name}.jinja" for name in ("unended", "unknown", "refusing"))
    unended.write_text("{% for m in messages %}{{ m.content }}")
    unknown.write_text("\n{{ messages | shortened }}")
    refusing.write_text("{{ raise_exception('roles must alternate') }}")
    for file, why in (
        (unended, r"Unexpected end of template\. .* \(line 1\); mend it"),
        (unknown, r"No filter named 'shortened'\. \(line 2\); mend it"),
    ):
        with pytest.raises(EngineError, match=f"the chat template cannot be read: {why}"):
            await start("a", **{"chat-template": str(file)})
    model = await start("a", **{"chat-template": str(refusing)})
    chat = {"model": "a", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    answer = await model.client.post("/v1/chat/completions", json=chat)
    assert answer.status_code == 400
    assert "roles must alternate" in answer.json()["error"]["message"]
    assert await model.says() == "AAA"


async def test_a_parser_that_the_tokenizer_does_not_suit_fails_the_model(start: Start) -> None:
    with pytest.raises(EngineError, match="could not locate think start/end tokens in the tokenizer"):
        await start("a", **{"reasoning-parser": "deepseek_r1"})
