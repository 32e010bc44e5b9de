"""A request does not hold up the others while the pinned vLLM prepares it, nor its log or its engines."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import msgspec
from starlette.responses import JSONResponse
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.serve.tokenize import api_router
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.inputs import TextPrompt, TokensPrompt, tokens_input
from vllm.renderers.params import TokenizeParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from dynamo_local.core.messages.work import Submit, TokenDelta
from dynamo_local.engine.vllm.frontend.core_client import build
from dynamo_local.engine.vllm.frontend.grammar_threads import GrammarThreads
from dynamo_local.engine.vllm.patches.frontend import LONG_TEXT, ClientErrors, text_length
from dynamo_local.engine.vllm.patches.requests import limit_grammar_compilation
from dynamo_local.engine.vllm.requests import wire
from dynamo_local.engine.vllm.requests.faults import cause_of
from dynamo_local.model.named.random_model import random_model
from tests.e2e.contract.test_vllm import OneByOne
from tests.e2e.llm_server import PATIENCE_S

GRAMMAR_TIMEOUT_S = 0.3
UNBOUNDED = TokenizeParams(max_total_tokens=None, add_special_tokens=False)


@pytest.fixture
def dispatcher() -> OneByOne:
    return OneByOne()


@pytest.fixture
async def llm(dispatcher: OneByOne) -> AsyncIterator[AsyncLLM]:
    config = AsyncEngineArgs(model=str(random_model()), max_model_len=256).create_engine_config()
    llm = await asyncio.to_thread(build, config, dispatcher, log_stats=True, grammar_timeout_s=GRAMMAR_TIMEOUT_S)
    yield llm
    llm.shutdown()


class Gated:
    """A function that waits, in whatever thread, until it may go on with what `is_held` says of its arguments."""

    def __init__(self, function: Callable[..., Any], is_held: Callable[..., bool]) -> None:
        self._function, self._is_held = function, is_held
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_held(*args):
            self.begun.set()
            assert self.may_go_on.wait(PATIENCE_S)
        return self._function(*args, **kwargs)


async def test_a_short_prompt_does_not_wait_for_a_long_one(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer: Any = llm.renderer
    # The pool is bound to the method, so what is replaced is what that calls.
    tokenizing = Gated(renderer.get_tokenizer(), lambda text, *_: len(text) > LONG_TEXT)
    monkeypatch.setattr(renderer, "get_tokenizer", lambda: tokenizing)

    async def tokens(text: str) -> int:
        (prompt,) = await renderer.tokenize_prompts_async([TextPrompt(prompt=text)], UNBOUNDED)
        return len(prompt["prompt_token_ids"])

    long = asyncio.create_task(tokens("word " * LONG_TEXT))
    another = asyncio.create_task(tokens("more " * LONG_TEXT))
    async with asyncio.timeout(PATIENCE_S):
        assert await asyncio.to_thread(tokenizing.begun.wait, PATIENCE_S)
        assert [await tokens("short") > 0 for _ in range(3)] == [True] * 3
        assert not long.done()
        tokenizing.may_go_on.set()
        assert await long > LONG_TEXT
        assert await another > LONG_TEXT


@pytest.mark.parametrize("content", ["a" * LONG_TEXT, [{"type": "text", "text": "a" * LONG_TEXT}]])
def test_a_conversation_is_as_long_as_its_texts(content: Any) -> None:
    conversation = [{"role": "user", "content": "b"}, {"role": "user", "content": content}]
    assert text_length(functools.partial(print, object(), conversation, chat_template=None)) > LONG_TEXT
    assert text_length(functools.partial(print, object(), conversation[:1])) < 10
    assert text_length(functools.partial(print, [1] * LONG_TEXT)) == LONG_TEXT


def test_many_tokens_are_written_quickly_and_as_ever(llm: AsyncLLM) -> None:
    content = {"tokens": [1, 2], "token_strs": ["é", "\n"], "count": 2, "max_model_len": 256}
    quick: Any = vars(api_router)["JSONResponse"]
    assert quick is not JSONResponse
    assert quick(content).body == JSONResponse(content).body


async def generate(llm: AsyncLLM, name: str, params: SamplingParams) -> list[int]:
    tokens: list[int] = []
    async for output in llm.generate(tokens_input([1]), params, name):
        tokens = list(output.outputs[0].token_ids)
    return tokens


def constrained() -> SamplingParams:
    return SamplingParams(max_tokens=1, structured_outputs=StructuredOutputsParams(regex="a+"))


async def answered(llm: AsyncLLM, dispatcher: OneByOne, name: str, params: SamplingParams) -> list[int]:
    generating = asyncio.create_task(generate(llm, name, params))
    request = await dispatcher.submitted.get()
    assert name in request.request_id
    dispatcher.answer(TokenDelta(request.request_id, 1, 0, [65], finish="length"))
    return await generating


async def test_the_event_loop_does_not_check_grammars(
    llm: AsyncLLM, dispatcher: OneByOne, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifying = Gated(SamplingParams.verify, lambda params, *_: params.structured_outputs is not None)
    calls: list[int] = []

    def verify(*args: Any) -> None:
        calls.append(threading.get_ident())
        verifying(*args)

    monkeypatch.setattr(SamplingParams, "verify", verify)
    slow = asyncio.create_task(generate(llm, "slow", constrained()))
    async with asyncio.timeout(PATIENCE_S):
        assert await asyncio.to_thread(verifying.begun.wait, PATIENCE_S)
        assert await answered(llm, dispatcher, "other", SamplingParams(max_tokens=1)) == [65]
        assert not slow.done()
        verifying.may_go_on.set()
        request = await dispatcher.submitted.get()
        dispatcher.answer(TokenDelta(request.request_id, 1, 0, [66], finish="length"))
        assert await slow == [66]
    # That of the grammar once, and elsewhere.
    assert len(calls) == 2
    assert calls.count(threading.get_ident()) == 1


async def test_a_grammar_that_takes_too_long_to_check_is_a_bad_request(
    llm: AsyncLLM, dispatcher: OneByOne, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()

    def verify(params: SamplingParams, *args: Any) -> None:
        while params.structured_outputs is not None and not may_end.is_set():
            pass

    monkeypatch.setattr(SamplingParams, "verify", verify)
    try:
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(VLLMClientError, match="grammar-timeout-s"):
                await generate(llm, "slow", constrained())
            assert await answered(llm, dispatcher, "other", SamplingParams(max_tokens=1)) == [65]
    finally:
        may_end.set()


@pytest.mark.parametrize("bad", [10**6, -1])
async def test_a_token_that_there_is_not_is_refused_before_anything_begins(llm: AsyncLLM, bad: int) -> None:
    prompts = [TokensPrompt(prompt_token_ids=[1, 2]), TokensPrompt(prompt_token_ids=[1, bad])]
    with pytest.raises(VLLMValidationError, match="out of vocabulary"):
        await llm.renderer.render_cmpl_async(prompts, UNBOUNDED)
    assert len(await llm.renderer.render_cmpl_async(prompts[:1], UNBOUNDED)) == 1


def test_what_clients_do_wrong_is_not_logged(llm: AsyncLLM) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign,assignment]
    handler.addFilter(ClientErrors())
    log = logging.getLogger("test of client errors")
    log.addHandler(handler)
    for error in (VLLMValidationError("a token"), ValueError("ours")):
        try:
            raise error
        except Exception:
            log.exception("Error in completion stream generator.")
    assert [record.exc_info[1] for record in records if record.exc_info] == [error]
    installed = [known for handler in logging.getLogger("vllm").handlers for known in handler.filters]
    assert any(isinstance(known, ClientErrors) for known in installed)


class SlowBackend:
    """Compiles for as long as the test wants."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.may_end = threading.Event()

    def compile_grammar(self, kind: Any, grammar: str, stop_token_ids: Any = None) -> Any:
        self.asked.append(grammar)
        while grammar == "slow" and not self.may_end.is_set():
            pass
        return SimpleNamespace(grammar=grammar)


@pytest.fixture
def backend() -> Iterator[SlowBackend]:
    backend = SlowBackend()
    yield backend
    backend.may_end.set()


@pytest.fixture
def manager(backend: SlowBackend, monkeypatch: pytest.MonkeyPatch) -> StructuredOutputManager:
    """vLLM's, of an engine core, with the threads that it is given here."""
    for name in ("__init__", "_create_grammar"):
        monkeypatch.setattr(StructuredOutputManager, name, getattr(StructuredOutputManager, name))
    monkeypatch.setenv("DYN_GRAMMAR_TIMEOUT_S", f"{GRAMMAR_TIMEOUT_S}")
    limit_grammar_compilation.__wrapped__()
    config = AsyncEngineArgs(model=str(random_model()), max_model_len=256).create_engine_config()
    manager = StructuredOutputManager(config)
    assert isinstance(manager.executor, GrammarThreads)
    manager.backend = backend  # type: ignore[assignment]
    return manager


def begun(manager: StructuredOutputManager, regex: str, status: RequestStatus | None = None) -> Request:
    structured = StructuredOutputsParams(regex=regex)
    structured._backend = "xgrammar"
    sampling = msgspec.msgpack.encode(SamplingParams(max_tokens=20, structured_outputs=structured))
    request = Request.from_engine_core_request(
        wire.core_request_of(Submit(regex, 1, "f", [1], msgspec.Raw(sampling))), None
    )
    if status is not None:
        request.status = status
    manager.grammar_init(request)
    return request


def settled(request: Request) -> Any:
    assert request.structured_output_request is not None
    grammar: Any = request.structured_output_request._grammar
    grammar.exception(PATIENCE_S)
    assert request.structured_output_request.is_grammar_ready
    return request.structured_output_request.grammar


def test_an_engine_gives_up_a_grammar_that_takes_too_long(
    manager: StructuredOutputManager, backend: SlowBackend
) -> None:
    slow = [begun(manager, "slow") for _ in range(2)]
    other = begun(manager, "other")
    for request in slow:
        assert isinstance(settled(request), Exception)
        cause, why = cause_of(request.trace_headers)
        assert cause == "request"
        assert "takes longer than 0.3 s to compile (setting grammar-timeout-s)" in why
    assert settled(other).grammar == "other"
    assert cause_of(other.trace_headers)[0] is None


def test_a_grammar_that_nobody_waits_for_is_not_begun(manager: StructuredOutputManager, backend: SlowBackend) -> None:
    ended = begun(manager, "slow", RequestStatus.FINISHED_ABORTED)
    assert isinstance(settled(ended), Exception)
    assert settled(begun(manager, "other")).grammar == "other"
    assert backend.asked == ["other"]
