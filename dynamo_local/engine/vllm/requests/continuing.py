"""A request that goes on from earlier epochs, as vLLM has one that it resumes after a preemption.

vLLM computes the context of a resumed request anew, prompt and output, and knows which tokens are which. All that is
counted over the output (penalties, bad words, repetitions, token limits) rests on that. A request that is new to an
engine has no output, and vLLM offers no way to say otherwise. So three of its functions are wrapped, each of which
makes state of a request's parameters:

- `Request.from_engine_core_request`, in the engine core: the request, as the scheduler has it;
- `StructuredOutputManager._create_grammar`, there too: its grammar, which the output has taken further (and
  `accept_tokens` beside it: whose fault it is if a grammar fails, of whatever request; faults.py);
- `CachedRequestState.__post_init__`, in the workers of vLLM's first model runner: the request, as it is sampled. (The
  second one takes it from the scheduler, as after a preemption.)

They go by an extra argument that only wire.py sets. Without it they change nothing, except the generators of
seeded_sampling.py and what faults.py notes.
Contract tests hold all this to the pinned vLLM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.structured_output.request import StructuredOutputRequest
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from dynamo_local.engine.vllm.requests.faults import blame, blame_for_grammar, blame_for_token
from dynamo_local.engine.vllm.requests.seeded_sampling import SeededSampling
from dynamo_local.engine.vllm.requests.wire import ACCEPTED


@cache
def install() -> None:
    """Have this process, and those forked from it, continue requests. Calling it again does nothing."""
    # Through names of no type: mypy sees no more than that methods are assigned.
    request: Any = Request
    grammars: Any = StructuredOutputManager
    state: Any = CachedRequestState
    request.from_engine_core_request = classmethod(_with_output(request.from_engine_core_request.__func__))
    compiled = grammars._create_grammar
    grammars._create_grammar = _taken_further(compiled)
    grammars.accept_tokens = _looked_into(grammars.accept_tokens, compiled)
    state.__post_init__ = _begun(state.__post_init__)


class _Continued(Request):
    """Until its first token its whole context counts as prompt: vLLM's statistics take what a new request finds in the
    cache for a part of its prompt."""

    def take_prefill_stats(self) -> PrefillStats | None:
        assert self.prompt_token_ids is not None
        self.num_prompt_tokens = len(self.prompt_token_ids)
        return super().take_prefill_stats()


def _with_output(made: Callable[..., Request]) -> Callable[..., Request]:
    @wraps(made, assigned=())
    def from_engine_core_request(cls: type[Request], request: Any, block_hasher: Any) -> Request:
        accepted = _accepted(request.sampling_params)
        if not accepted:
            return made(cls, request, block_hasher)
        continued = made(_Continued, request, block_hasher)
        continued.append_output_token_ids(accepted)
        continued.num_prompt_tokens = continued.num_tokens
        return continued

    return from_engine_core_request


@dataclass
class _Replay:
    """As much of a request as the grammar's way is decided by, at each of its tokens again."""

    request_id: str
    prompt_token_ids: list[int] | None
    all_token_ids: list[int]
    structured_output_request: StructuredOutputRequest
    use_structured_output: bool = True


def _taken_further(
    compiled: Callable[[StructuredOutputManager, Request], StructuredOutputGrammar],
) -> Callable[[StructuredOutputManager, Request], StructuredOutputGrammar]:
    @wraps(compiled, assigned=())
    def create_grammar(manager: StructuredOutputManager, request: Request) -> StructuredOutputGrammar:
        try:
            grammar = compiled(manager, request)
        except Exception as error:
            blame_for_grammar(manager, request, error)
            raise
        if request.num_output_tokens:
            try:
                ended = _replay(manager, request, request.output_token_ids, grammar)
            except _NotAllowedError as error:
                blame(request, "lost", str(error))
                raise
            structured = request.structured_output_request
            assert structured is not None
            structured.reasoning_ended, structured.reasoner = ended.reasoning_ended, ended.reasoner
        return grammar

    return create_grammar


def _looked_into(
    accept: Callable[[StructuredOutputManager, Any, list[int]], bool],
    compiled: Callable[[StructuredOutputManager, Request], StructuredOutputGrammar],
) -> Callable[[StructuredOutputManager, Any, list[int]], bool]:
    @wraps(accept, assigned=())
    def accept_tokens(manager: StructuredOutputManager, request: Any, new_token_ids: list[int]) -> bool:
        if accept(manager, request, new_token_ids):
            return True
        # Of several tokens, it is not known which one it is.
        if isinstance(request, Request) and len(new_token_ids) == 1:
            before = list(request.output_token_ids)[:-1]
            blame_for_token(manager, request, before, lambda output: _grammar_after(manager, request, output, compiled))
        return False

    return accept_tokens


def _grammar_after(
    manager: StructuredOutputManager,
    request: Request,
    output: Sequence[int],
    compiled: Callable[[StructuredOutputManager, Request], StructuredOutputGrammar],
) -> StructuredOutputGrammar:
    grammar = compiled(manager, request)
    _replay(manager, request, output, grammar)
    return grammar


class _NotAllowedError(ValueError):
    """The grammar does not allow what the request has brought."""


def _replay(
    manager: StructuredOutputManager, request: Request, output: Sequence[int], grammar: StructuredOutputGrammar
) -> StructuredOutputRequest:
    """Take the grammar, and what is known of the reasoning before it, to the end of `output`. Returns the latter.

    Token by token, as they were generated: with a reasoning parser, which of them are the grammar's is found out by the
    way. Raises _NotAllowedError for output that the grammar does not allow.
    """
    structured, prompt = request.structured_output_request, request.prompt_token_ids
    assert structured is not None
    assert prompt is not None
    ours = dataclasses.replace(structured, _grammar=grammar)
    so_far = _Replay(request.request_id, prompt, list(prompt), ours)
    for token in output:
        so_far.all_token_ids.append(token)
        if not manager.accept_tokens(so_far, [token]):  # type: ignore[arg-type]
            raise _NotAllowedError("the grammar does not allow what the request has brought so far")
    return ours


def _begun(initialise: Callable[[CachedRequestState], None]) -> Callable[[CachedRequestState], None]:
    @wraps(initialise, assigned=())
    def post_init(state: CachedRequestState) -> None:
        if accepted := _accepted(state.sampling_params):
            state.output_token_ids = list(accepted)
        initialise(state)
        if state.generator is not None and state.generator.device.type == "cpu":
            state.generator = SeededSampling(state)

    return post_init


def _accepted(params: SamplingParams | None) -> list[int]:
    extra = None if params is None else params.extra_args
    found: list[int] = extra.get(ACCEPTED, []) if extra else []
    return found
