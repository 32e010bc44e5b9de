"""How an engine core and its workers treat requests: continuation, grammars, tokens, adapters. Imports vLLM."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Collection, Sequence
from functools import cache, wraps
from typing import Any

import torch
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.request import Request
from vllm.v1.sample.sampler import Sampler
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from dynamo_local.engine.vllm.frontend.grammar_threads import GrammarThreads, timeout_of
from dynamo_local.engine.vllm.patches.scheduler import have_requests_take_turns, have_urgent_requests_find_room
from dynamo_local.engine.vllm.patches.table import applies
from dynamo_local.engine.vllm.requests.continuing import (
    NotAllowedError,
    SeededSampling,
    accepted_tokens,
    replay_grammar,
)
from dynamo_local.engine.vllm.requests.faults import blame, blame_for_grammar, blame_for_token


def patch_requests() -> None:
    """Apply these patches and those of the scheduler to this process, and so to the processes forked from it. A second
    call changes nothing."""
    continue_requests()
    limit_grammar_compilation()
    separate_logprobs()
    have_requests_take_turns()
    have_urgent_requests_find_room()
    refuse_adapters_of_other_models()


# A request that goes on from earlier epochs is treated as vLLM treats one that it resumes after a preemption.
#
# vLLM computes the context of a resumed request anew, prompt and output, and knows which tokens are which. All that is
# counted over the output (penalties, bad words, repetitions, token limits) rests on that. A request that is new to an
# engine has no output, and vLLM offers no way to say otherwise. So the functions are wrapped that make state of a
# request's parameters:
#
# - `Request.from_engine_core_request`, in the engine core: the request, as the scheduler has it;
# - `StructuredOutputManager._create_grammar`, there too: its grammar, which the output has taken further (and
#   `accept_tokens` beside it: whose fault a failing grammar is, of whatever request; requests/faults.py);
# - `CachedRequestState.__post_init__`, in the workers of vLLM's first model runner: the request, as it is sampled. (The
#   second one takes it from the scheduler, as after a preemption.)
#
# Without output of earlier epochs the wrappers change nothing, except the generators of requests/continuing.py and
# the causes that requests/faults.py notes.


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


# Deadline for the compilation of a grammar in an engine.
#
# A request whose grammar takes longer fails, by its own fault (requests/faults.py). The grammar of a request whose
# client has left is not compiled.


class _AbandonedError(Exception):
    """A request has ended before the compilation of its grammar has begun."""


@cache
def limit_grammar_compilation() -> None:
    """Limit the time in this process, and so in those forked from it. A second call changes nothing."""
    if not applies("deadlines of grammars"):
        return
    manager: Any = StructuredOutputManager
    manager.__init__ = _with_threads(manager.__init__)
    manager._create_grammar = _unless_ended(manager._create_grammar)


def threads_of_engine(timeout_s: float) -> GrammarThreads:
    """Make the threads of an engine: as many at once as vLLM has."""
    return GrammarThreads(max(1, (multiprocessing.cpu_count() + 1) // 2), timeout_s, late=_blame_late(timeout_s))


def _with_threads(initialise: Callable[..., None]) -> Callable[..., None]:
    @wraps(initialise)
    def init(manager: Any, vllm_config: Any) -> None:
        initialise(manager, vllm_config)
        if not vllm_config.model_config.skip_tokenizer_init:
            manager.executor.shutdown(wait=False)
            manager.executor = threads_of_engine(timeout_of(os.environ))

    return init


def _unless_ended(create: Callable[[Any, Request], Any]) -> Callable[[Any, Request], Any]:
    @wraps(create)
    def create_grammar(manager: Any, request: Request) -> Any:
        if request.is_finished():
            raise _AbandonedError
        return create(manager, request)

    return create_grammar


def _blame_late(timeout_s: float) -> Callable[[Request], None]:
    def late(request: Request) -> None:
        if request.num_output_tokens:
            # Another engine has compiled it before.
            blame(request, "lost", "the grammar of the structured output could not be compiled again in time")
        else:
            why = f"the grammar of the structured output takes longer than {timeout_s:g} s to compile"
            blame(request, "request", f"{why} (setting grammar-timeout-s)")

    return late


# Log-probabilities of tokens that a request names (`logprob_token_ids`), beside other requests of the same batch.
#
# As soon as one request of a step names tokens, vLLM's sampler gathers named tokens alone: the others of that step that
# asked for the most likely candidates would be told of the sampled token and of nothing else. Here each row has what
# its own request asked for.

_MOST = "_dynamo_most_candidates"


@cache
def separate_logprobs() -> None:
    """Patch the samplers of this process, and so of those forked from it. A second call changes nothing."""
    if not applies("candidates beside named tokens"):
        return
    sampler: Any = Sampler
    sampler.forward = _noting_candidates(sampler.forward)
    sampler.gather_specific_token_logprobs = _with_candidates(sampler.gather_specific_token_logprobs)


def _noting_candidates(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def noting(sampler: Any, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(sampler, _MOST, sampling_metadata.max_num_logprobs)
        return forward(sampler, logits, sampling_metadata, *args, **kwargs)

    return noting


def _with_candidates(gather: Callable[..., LogprobsTensors | None]) -> Callable[..., LogprobsTensors | None]:
    @wraps(gather)
    def gather_both(
        sampler: Any, logprobs: torch.Tensor, named: dict[int, list[int]], sampled: torch.Tensor
    ) -> LogprobsTensors | None:
        of_named = gather(sampler, logprobs, named, sampled)
        most = getattr(sampler, _MOST)
        if of_named is None or not most:
            return of_named
        return _merged(of_named, sampler.gather_logprobs(logprobs, most, token_ids=sampled), named)

    return gather_both


def _merged(of_named: LogprobsTensors, likeliest: LogprobsTensors, rows: Collection[int]) -> LogprobsTensors:
    """Take these rows from `of_named`, all others from `likeliest`."""
    width = max(of_named.logprobs.shape[1], likeliest.logprobs.shape[1])
    is_named = torch.zeros(len(of_named.logprobs), 1, dtype=torch.bool)
    is_named[list(rows)] = True
    is_named = is_named.to(of_named.logprobs.device)

    def chosen(one: torch.Tensor, other: torch.Tensor, filling: float) -> torch.Tensor:
        return torch.where(is_named, _widened(one, width, filling), _widened(other, width, filling))

    return LogprobsTensors(
        chosen(of_named.logprob_token_ids, likeliest.logprob_token_ids, 0),
        chosen(of_named.logprobs, likeliest.logprobs, float("-inf")),
        of_named.selected_token_ranks,
    )


def _widened(rows: torch.Tensor, width: int, filling: float) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=filling)


# Refuses a LoRA adapter of which no tensor is for a module of the model.
#
# vLLM loads it without a word, and answers as the model alone would. Most such adapters are found before, from the
# files (model/adapter.py); vLLM alone knows by which names its model has the modules.


@cache
def refuse_adapters_of_other_models() -> None:
    """Patch the loading of adapters in this process, and so in those forked from it. A second call changes nothing."""
    if not applies("adapters that fit nothing"):
        return
    from vllm.lora.model_manager import LoRAModelManager

    # Through a name of no type: mypy sees no more than that a method is assigned.
    manager: Any = LoRAModelManager
    manager._create_merged_loras_inplace = _comparing(manager._create_merged_loras_inplace)


def _comparing(merge: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    @wraps(merge)
    def comparing(manager: Any, lora_model: Any) -> None:
        names = list(lora_model.loras)
        merge(manager, lora_model)
        from vllm.distributed import get_pp_group

        is_whole = get_pp_group().world_size == 1 and not lora_model.modules_to_save
        if is_whole and not any(manager._get_lora_layer_weights(lora_model, name) for name in manager.modules):
            shown = f"such as {names[0]}" if names else "there are none"
            raise ValueError(f"none of its tensors is for a module of the model ({shown})")

    return comparing
