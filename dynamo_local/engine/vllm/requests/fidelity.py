"""Survival of sampling parameters in a new epoch: a classification of every field of `SamplingParams`.

In a new epoch the engine has the request as one that it resumes: it knows the prompt from the output so far
(patches/requests.py). What a parameter computes from these, or from the next token's logits alone, is
unchanged. What it keeps as state in the engine is rebuilt where that can be done exactly (a grammar, a random
generator), and lost where not. A contract test fails when vLLM adds a field. The table is
explained in docs/internals/fidelity.md.
"""

from __future__ import annotations

from vllm.sampling_params import SamplingParams

from dynamo_local.core.request.fidelity import Fidelity, Survival

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
