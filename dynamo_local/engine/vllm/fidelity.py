"""Which sampling parameters survive a new epoch. One classification of every field of `SamplingParams`.

In a new epoch the tokens accepted so far stand in the prompt, and token limits are reduced by their number. What a
parameter computes from prompt and output together, or from the next token's logits alone, is unchanged. What it
computes from the output alone, or keeps as state in the engine (a random generator, a grammar), is lost. A contract
test fails when vLLM adds a field; docs/fidelity.md explains the table.
"""

from __future__ import annotations

from vllm.sampling_params import SamplingParams

from dynamo_local.core.fidelity import Fidelity, Survival

_EXACT, _NONE = Fidelity.EXACT, Fidelity.NONE

WHEN_USED: dict[str, Fidelity] = {
    # Split into requests of one choice each before they get here.
    "n": _EXACT,
    # The distribution of the next token: a function of the context.
    "temperature": Fidelity.DISTRIBUTION,
    "top_p": _EXACT,
    "top_k": _EXACT,
    "min_p": _EXACT,
    "logit_bias": _EXACT,
    "allowed_token_ids": _EXACT,
    # Over prompt and output together.
    "repetition_penalty": _EXACT,
    # Over the output alone, which a new epoch takes for prompt.
    "presence_penalty": _NONE,
    "frequency_penalty": _NONE,
    "bad_words": _NONE,
    "_bad_words_token_ids": _NONE,
    "repetition_detection": _NONE,
    "thinking_token_budget": _NONE,
    # State inside the engine.
    "seed": _NONE,
    "structured_outputs": _NONE,
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
    # Reported beside the tokens. Those of the prompt are told once, by the first epoch.
    "logprobs": _EXACT,
    "logprob_token_ids": _EXACT,
    "flat_logprobs": _EXACT,
    "prompt_logprobs": _EXACT,
    "prompt_logprob_start": _EXACT,
    "prompt_logprob_token_ids": _EXACT,
    "skip_reading_prefix_cache": _EXACT,
}
"""How a request that uses the field (sets it to something else than its default) survives."""

_DEFAULTS = SamplingParams()


def survival_of(params: SamplingParams) -> Survival:
    """How a request with these parameters survives a new epoch. A field that is not in the table counts as lost."""
    greedy = params.temperature == 0
    worst = Survival() if greedy else Survival(Fidelity.DISTRIBUTION, "temperature")
    for name in params.__struct_fields__:
        if name in ("temperature", "seed") and greedy:
            continue
        if name != "temperature" and not _is_used(name, getattr(params, name)):
            continue
        fidelity = WHEN_USED.get(name, _NONE)
        if fidelity > worst.fidelity:
            worst = Survival(fidelity, name.lstrip("_"))
    return worst


def _is_used(name: str, value: object) -> bool:
    """Whether a field does anything. One that is off until asked for may be spelled None or False."""
    return value is not False and value != getattr(_DEFAULTS, name)
