"""Sampling parameters of a request: the fields of vLLM's SamplingParams that mean something without a model.

Others (temperature, seed, penalties and so on) are passed over: a token follows from its context alone. vLLM
leaves defaults out when it encodes, so the defaults here are vLLM's.
"""

from __future__ import annotations

import msgspec

from dynamo_local.core.errors import BadRequestError, RequestError


class Sampling(msgspec.Struct, frozen=True):
    """Token limits count from where the submission starts."""

    n: int = 1
    max_tokens: int | None = 16
    """Tokens to draw at most. None: as many as the context limit allows."""
    min_tokens: int = 0
    """Tokens that have to be drawn before one of them can stop the request."""
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] | None = None
    logprobs: int | None = None
    """Candidates beside the chosen token; -1: the whole vocabulary."""
    prompt_logprobs: int | None = None
    eos_token_id: int | None = msgspec.field(default=None, name="_eos_token_id")


_decoder = msgspec.msgpack.Decoder(Sampling)


def read_sampling(encoded: bytes | msgspec.Raw, vocab_size: int) -> Sampling:
    """Decode a submission's sampling parameters. Raises RequestError for what this engine cannot do."""
    try:
        sampling = _decoder.decode(encoded)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the sampling parameters cannot be read: {error}") from error
    if sampling.n != 1:
        raise BadRequestError(f"one output a request is supported, not {sampling.n}")
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise BadRequestError(f"max_tokens must be at least 1, not {sampling.max_tokens}")
    if sampling.logprobs is not None and not -1 <= sampling.logprobs <= vocab_size:
        raise BadRequestError(f"logprobs must be -1 to {vocab_size}, not {sampling.logprobs}")
    if sampling.prompt_logprobs is not None:
        raise BadRequestError("the mocker has no prompt_logprobs")
    return sampling
