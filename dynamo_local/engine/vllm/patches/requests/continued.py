"""A request that goes on from earlier epochs is treated as vLLM treats one that it resumes after a preemption.

vLLM computes the context of a resumed request anew, prompt and output, and knows which tokens are which. All that is
counted over the output (penalties, bad words, repetitions, token limits) rests on that. A request that is new to an
engine has no output, and vLLM offers no way to say otherwise. So the functions are wrapped that make state of a
request's parameters:

- `Request.from_engine_core_request`, in the engine core: the request, as the scheduler has it;
- `StructuredOutputManager._create_grammar`, there too: its grammar, which the output has taken further (and
  `accept_tokens` beside it: whose fault a failing grammar is, of whatever request; requests/faults.py);
- `CachedRequestState.__post_init__`, in the workers of vLLM's first model runner: the request, as it is sampled. (The
  second one takes it from the scheduler, as after a preemption.)

Without output of earlier epochs the wrappers change nothing, except the generators of requests/seeded_sampling.py and
the causes that requests/faults.py notes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any

from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from dynamo_local.engine.vllm.requests.continuing import NotAllowedError, accepted_tokens, replay_grammar
from dynamo_local.engine.vllm.requests.faults import blame, blame_for_grammar, blame_for_token
from dynamo_local.engine.vllm.requests.seeded_sampling import SeededSampling


@cache
def continue_requests() -> None:
    """Wrap the functions in this process, and so in those forked from it. A second call changes nothing."""
    # Through names of no type: mypy sees no more than that methods are assigned.
    request: Any = Request
    grammars: Any = StructuredOutputManager
    state: Any = CachedRequestState
    request.from_engine_core_request = classmethod(_with_output(request.from_engine_core_request.__func__))
    compile_grammar = grammars._create_grammar
    grammars._create_grammar = _advanced(compile_grammar)
    grammars.accept_tokens = _explained(grammars.accept_tokens, compile_grammar)
    state.__post_init__ = _begun(state.__post_init__)


class _Continued(Request):
    """Counts its whole context as prompt until its first token: vLLM's statistics take what a new request finds in the
    cache for a part of its prompt."""

    def take_prefill_stats(self) -> PrefillStats | None:
        assert self.prompt_token_ids is not None
        self.num_prompt_tokens = len(self.prompt_token_ids)
        return super().take_prefill_stats()


def _with_output(make: Callable[..., Request]) -> Callable[..., Request]:
    @wraps(make, assigned=())
    def from_engine_core_request(cls: type[Request], request: Any, block_hasher: Any) -> Request:
        accepted = accepted_tokens(request.sampling_params)
        if not accepted:
            return make(cls, request, block_hasher)
        continued = make(_Continued, request, block_hasher)
        continued.append_output_token_ids(accepted)
        continued.num_prompt_tokens = continued.num_tokens
        return continued

    return from_engine_core_request


def _advanced(
    compile_grammar: Callable[[StructuredOutputManager, Request], StructuredOutputGrammar],
) -> Callable[[StructuredOutputManager, Request], StructuredOutputGrammar]:
    @wraps(compile_grammar, assigned=())
    def create_grammar(manager: StructuredOutputManager, request: Request) -> StructuredOutputGrammar:
        try:
            grammar = compile_grammar(manager, request)
        except Exception as error:
            blame_for_grammar(manager, request, error)
            raise
        if request.num_output_tokens:
            try:
                replayed = replay_grammar(manager, request, request.output_token_ids, grammar)
            except NotAllowedError as error:
                blame(request, "lost", str(error))
                raise
            structured = request.structured_output_request
            assert structured is not None
            structured.reasoning_ended, structured.reasoner = replayed.reasoning_ended, replayed.reasoner
        return grammar

    return create_grammar


def _explained(
    accept: Callable[[StructuredOutputManager, Any, list[int]], bool],
    compile_grammar: Callable[[StructuredOutputManager, Request], StructuredOutputGrammar],
) -> Callable[[StructuredOutputManager, Any, list[int]], bool]:
    @wraps(accept, assigned=())
    def accept_tokens(manager: StructuredOutputManager, request: Any, new_token_ids: list[int]) -> bool:
        if accept(manager, request, new_token_ids):
            return True

        def grammar_after(output: Sequence[int]) -> StructuredOutputGrammar:
            grammar = compile_grammar(manager, request)
            replay_grammar(manager, request, output, grammar)
            return grammar

        # Of several tokens, it is not known which one is rejected.
        if isinstance(request, Request) and len(new_token_ids) == 1:
            blame_for_token(manager, request, list(request.output_token_ids)[:-1], grammar_after)
        return False

    return accept_tokens


def _begun(initialise: Callable[[CachedRequestState], None]) -> Callable[[CachedRequestState], None]:
    @wraps(initialise, assigned=())
    def post_init(state: CachedRequestState) -> None:
        if accepted := accepted_tokens(state.sampling_params):
            state.output_token_ids = list(accepted)
        initialise(state)
        if state.generator is not None and state.generator.device.type == "cpu":
            state.generator = SeededSampling(state)

    return post_init
