"""What of a request survives in a new epoch, and how its state is rebuilt there. Imports vLLM.

patches/requests.py gives output and state to vLLM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import CpuArchEnum, current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.structured_output.request import StructuredOutputRequest

from dynamo_local.core.request.recovery import Fidelity, Survival

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import CachedRequestState


# Survival of sampling parameters in a new epoch: a classification of every field of `SamplingParams`.
#
# In a new epoch the engine has the request as one that it resumes: it knows the prompt from the output so far. What a
# parameter computes from these, or from the next token's logits alone, is unchanged. What it keeps as state in the
# engine is rebuilt where that can be done exactly (a grammar, a random generator), and lost where not. A contract test
# fails when vLLM adds a field. The table is explained in docs/internals/fidelity.md.

ACCEPTED = "dynamo_local_accepted"
"""Extra argument of a request in an engine: the tokens of earlier epochs (patches/requests.py)."""

_EXACT, _NONE = Fidelity.EXACT, Fidelity.NONE

WHEN_USED: dict[str, Fidelity] = {
    # Split into requests of one choice each before they get here.
    "n": _EXACT,
    # The distribution of the next token: a function of the context. With a seed the very tokens are promised.
    "temperature": Fidelity.DISTRIBUTION,
    "top_p": _EXACT,
    "top_k": _EXACT,
    "min_p": _EXACT,
    "logit_bias": _EXACT,
    "allowed_token_ids": _EXACT,
    # Functions of prompt and output.
    "repetition_penalty": _EXACT,
    "presence_penalty": _EXACT,
    "frequency_penalty": _EXACT,
    "bad_words": _EXACT,
    "_bad_words_token_ids": _EXACT,
    "repetition_detection": _EXACT,
    # State inside the engine: rebuilt.
    "seed": _EXACT,
    "structured_outputs": _EXACT,
    # State inside the engine: lost. The budget is counted as it goes, and counted otherwise when it is resumed.
    "thinking_token_budget": _NONE,
    "watermarking": _NONE,
    "trace_decode_token_ids": _NONE,
    "routed_experts_prompt_start": _NONE,
    # Says that there is none.
    "_watermarking_skipped": _EXACT,
    # For extensions; what they do with it is unknown.
    "extra_args": _NONE,
    # Where to end.
    "max_tokens": _EXACT,
    "min_tokens": _EXACT,
    "ignore_eos": _EXACT,
    "stop_token_ids": _EXACT,
    "_eos_token_id": _EXACT,
    "_all_stop_token_ids": _EXACT,
    # Text is made, and searched for stop strings, in the frontend, which stays.
    "stop": _EXACT,
    "include_stop_str_in_output": _EXACT,
    "detokenize": _EXACT,
    "skip_special_tokens": _EXACT,
    "spaces_between_special_tokens": _EXACT,
    "output_kind": _EXACT,
    "output_text_buffer_length": _EXACT,
    "stream_interval": _EXACT,
    "skip_clone": _EXACT,
    # Reported beside the tokens. The first epoch alone sends those of the prompt.
    "logprobs": _EXACT,
    "logprob_token_ids": _EXACT,
    "flat_logprobs": _EXACT,
    "prompt_logprobs": _EXACT,
    "prompt_logprob_start": _EXACT,
    "prompt_logprob_token_ids": _EXACT,
    "skip_reading_prefix_cache": _EXACT,
}
"""Fidelity of a request that uses the field (sets it to something else than its default)."""

_REBUILT = ("seed", "structured_outputs")

_OF_OUTPUT = ("presence_penalty", "frequency_penalty", "bad_words", "_bad_words_token_ids", "repetition_detection")
"""Computed from the output alone."""

_DEFAULTS = SamplingParams()


def survival_of(params: SamplingParams) -> Survival:
    """Survival of a request with these parameters in a new epoch. A field that is not in the table counts as lost."""
    used = _used(params)
    worst = max(used, key=lambda name: WHEN_USED.get(name, _NONE), default=None)
    fidelity = _EXACT if worst is None else WHEN_USED.get(worst, _NONE)
    rebuilt = tuple(name for name in _REBUILT if name in used)
    if worst is None or fidelity is _EXACT:
        return Survival(rebuilt=rebuilt)
    return Survival(fidelity, worst.lstrip("_"), rebuilt)


def is_of_context(params: SamplingParams) -> bool:
    """Whether the next token is a function of the context alone, wherever in it the output begins."""
    return all(
        WHEN_USED.get(name, _NONE) is not _NONE and name not in (*_REBUILT, *_OF_OUTPUT) for name in _used(params)
    )


def _used(params: SamplingParams) -> list[str]:
    return [name for name in params.__struct_fields__ if _is_used(name, params)]


def _is_used(name: str, params: SamplingParams) -> bool:
    """Whether a field does anything. One that is off until asked for may be spelled None, False or {}."""
    if name == "temperature":
        return params.temperature > 0 and params.seed is None
    if name == "seed":
        return params.temperature > 0 and params.seed is not None
    value = getattr(params, name)
    return value is not False and value != {} and value != getattr(_DEFAULTS, name)


# Output of a request's earlier epochs, and the state of its grammar after that output.


class NotAllowedError(ValueError):
    """A grammar does not allow the output of earlier epochs."""


@dataclass
class _Replay:
    """Part of a request that the state of its grammar depends on, as it was at each of its tokens."""

    request_id: str
    prompt_token_ids: list[int] | None
    all_token_ids: list[int]
    structured_output_request: StructuredOutputRequest
    use_structured_output: bool = True


def accepted_tokens(params: SamplingParams | None) -> list[int]:
    """Output tokens of earlier epochs. Only wire.py sets them."""
    extra = None if params is None else params.extra_args
    found: list[int] = extra.get(ACCEPTED, []) if extra else []
    return found


def replay_grammar(
    manager: StructuredOutputManager, request: Request, output: Sequence[int], grammar: StructuredOutputGrammar
) -> StructuredOutputRequest:
    """Advance a fresh grammar, and the state of the reasoning before it, to the end of `output`. Returns the latter.

    Token by token, as they were generated: with a reasoning parser, the tokens decide on the way which of them are the
    grammar's. Raises NotAllowedError for output that the grammar does not allow.
    """
    structured, prompt = request.structured_output_request, request.prompt_token_ids
    assert structured is not None
    assert prompt is not None
    ours = dataclasses.replace(structured, _grammar=grammar)
    so_far = _Replay(request.request_id, prompt, list(prompt), ours)
    for token in output:
        so_far.all_token_ids.append(token)
        if not manager.accept_tokens(so_far, [token]):  # type: ignore[arg-type]
            raise NotAllowedError("the grammar does not allow what the request has brought so far")
    return ours


# Seeded sampling: puts a new random generator into the state that a lost one had.
#
# vLLM's second model runner has none: the noise of a draw is a function of seed and position. Its first one has a
# generator for each request. On a CPU a draw takes one number from it, so that it is rebuilt in no time.

_NATIVE = (CpuArchEnum.POWERPC, CpuArchEnum.RISCV)
"""Architectures on which vLLM draws as it does on a GPU."""


def forgotten(vllm_config: VllmConfig) -> tuple[str, ...]:
    """The sampling parameters whose state an engine so configured cannot rebuild."""
    if vllm_config.speculative_config is not None:
        # How many numbers a token has taken is up to the guesses.
        return ("seed",)
    if vllm_config.use_v2_model_runner or _draws_once(vllm_config):
        return ()
    return ("seed",)


def _draws_once(vllm_config: VllmConfig) -> bool:
    return (
        current_platform.is_cpu()
        and not vllm_config.model_config.use_fp64_gumbel
        and current_platform.get_cpu_architecture() not in _NATIVE
    )


class SeededSampling(torch.Generator):
    """The generator of a request on a CPU, as many draws from its seed as the request has output.

    vLLM sets a generator back by its offset when it has drawn for a part of a prompt, which is no token. Generators on
    a CPU have no offset and raise an error; set back, this one is where the output is.
    """

    def __new__(cls, _: CachedRequestState) -> SeededSampling:
        return super().__new__(cls)

    def __init__(self, state: CachedRequestState) -> None:
        self._state = state
        self._rewind()

    def get_offset(self) -> int:
        return 0

    def set_offset(self, _: int) -> SeededSampling:
        self._rewind()
        return self

    def _rewind(self) -> None:
        params: Any = self._state.sampling_params
        self.manual_seed(params.seed)
        torch.randint(0, 2**31, (len(self._state.output_token_ids),), generator=self)
