"""Whose fault the pinned vLLM's grammar errors are. test_own_fault.py has the whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import msgspec
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from dynamo_local.core.messages.work import Submit
from dynamo_local.engine.vllm.patches.requests import continue_requests
from dynamo_local.engine.vllm.requests import wire
from dynamo_local.engine.vllm.requests.faults import cause_of
from dynamo_local.model.named.random_model import random_model
from tests.e2e.llm_server import PATIENCE_S

PROMPT = [1, 2, 3]
NOT_COMPILED: dict[str, Any] = {"type": "string", "pattern": "(a|b|c){1,300}"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(random_model())


@pytest.fixture
def manager(tokenizer: Any) -> Iterator[StructuredOutputManager]:
    """vLLM's, as an engine core has it, with the library that it takes for most grammars."""
    continue_requests()
    config: Any = SimpleNamespace(
        structured_outputs_config=SimpleNamespace(disable_any_whitespace=False),
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(model_type="llama"), get_vocab_size=lambda: len(tokenizer)
        ),
        speculative_config=None,
    )
    bare: Any = StructuredOutputManager.__new__(StructuredOutputManager)
    bare.vllm_config = config
    bare._use_async_grammar_compilation = True
    bare.executor = ThreadPoolExecutor(1)
    bare.enable_in_reasoning = False
    bare.reasoner_cls = None
    bare.tokenizer = tokenizer
    bare.backend = XgrammarBackend(config, tokenizer=tokenizer, vocab_size=len(tokenizer))
    yield bare
    bare.executor.shutdown()


def begin(
    manager: StructuredOutputManager,
    constraint: dict[str, Any],
    output: Sequence[int] = (),
    backend: str = "xgrammar",
    **options: Any,
) -> Request:
    """A request whose grammar has been compiled, or not."""
    structured = StructuredOutputsParams(**constraint)
    structured._backend = backend
    sampling = msgspec.msgpack.encode(SamplingParams(max_tokens=20, structured_outputs=structured, **options))
    work = Submit("r", 1, "f", [*PROMPT, *output], msgspec.Raw(sampling), position=len(output))
    request = Request.from_engine_core_request(wire.core_request_of(work), None)
    manager.grammar_init(request)
    assert request.structured_output_request is not None
    grammar: Any = request.structured_output_request._grammar
    grammar.exception(PATIENCE_S)
    assert request.structured_output_request.is_grammar_ready
    return request


def sampled(manager: StructuredOutputManager, request: Request, *tokens: int) -> bool:
    """Accept tokens as vLLM's scheduler does."""
    return all(_take(manager, request, token) for token in tokens)


def _take(manager: StructuredOutputManager, request: Request, token: int) -> bool:
    request.append_output_token_ids(token)
    return manager.accept_tokens(request, [token])


def of(tokenizer: Any, text: str) -> list[int]:
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return tokens


def test_a_grammar_that_cannot_be_compiled_is_the_requests_fault(manager: StructuredOutputManager) -> None:
    cause, why = cause_of(begin(manager, {"json": NOT_COMPILED}).trace_headers)
    assert cause == "request"
    assert "cannot be compiled" in why
    assert "Check failed" in why


def test_an_engine_that_compiles_nothing_is_at_fault_itself(
    manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(manager.backend, "compile_grammar", fail)
    assert cause_of(begin(manager, {"regex": "a+"}).trace_headers)[0] is None


def test_an_engine_that_compiles_with_another_library_is_at_fault_itself(manager: StructuredOutputManager) -> None:
    assert cause_of(begin(manager, {"json": NOT_COMPILED}, backend="guidance").trace_headers)[0] is None


def test_what_another_engine_has_compiled_is_not_the_requests_fault(
    manager: StructuredOutputManager, tokenizer: Any
) -> None:
    assert cause_of(begin(manager, {"json": NOT_COMPILED}, of(tokenizer, '"')).trace_headers)[0] is None


def test_output_that_the_grammar_does_not_allow_is_lost_state(manager: StructuredOutputManager, tokenizer: Any) -> None:
    assert cause_of(begin(manager, {"regex": "ab+"}, of(tokenizer, "ax")).trace_headers)[0] == "lost"


@pytest.mark.parametrize("output", ["", "a", "abb"])
def test_a_wrong_token_is_the_engines_fault(manager: StructuredOutputManager, tokenizer: Any, output: str) -> None:
    request = begin(manager, {"regex": "ab+"})
    assert sampled(manager, request, *of(tokenizer, output))
    assert not sampled(manager, request, *of(tokenizer, "x"))
    assert cause_of(request.trace_headers)[0] is None


@pytest.mark.parametrize("earlier", [0, 1, 2])
def test_a_sampler_that_was_left_no_token_is_the_requests_fault(
    manager: StructuredOutputManager, tokenizer: Any, earlier: int
) -> None:
    """Whichever epoch has brought which part of the output."""
    output = of(tokenizer, "aa")
    request = begin(manager, {"regex": "aab"}, output[:earlier], allowed_token_ids=of(tokenizer, "a"))
    assert sampled(manager, request, *output[earlier:])
    assert not sampled(manager, request, *of(tokenizer, "a"))
    cause, why = cause_of(request.trace_headers)
    assert (cause, "after 2 tokens" in why) == ("request", True)


def test_words_that_are_forbidden_leave_no_token_either(manager: StructuredOutputManager, tokenizer: Any) -> None:
    request = begin(manager, {"regex": "aab"})
    assert request.sampling_params is not None
    request.sampling_params._bad_words_token_ids = [of(tokenizer, "aab")]
    assert sampled(manager, request, *of(tokenizer, "aa"))
    assert not sampled(manager, request, *of(tokenizer, "a"))
    assert cause_of(request.trace_headers)[0] == "request"
    # Not there, where something else may still follow.
    request = begin(manager, {"regex": "aab"})
    assert request.sampling_params is not None
    request.sampling_params._bad_words_token_ids = [of(tokenizer, "xab")]
    assert sampled(manager, request, *of(tokenizer, "aa"))
    assert not sampled(manager, request, *of(tokenizer, "a"))
    assert cause_of(request.trace_headers)[0] is None
