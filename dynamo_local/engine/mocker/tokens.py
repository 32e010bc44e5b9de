"""What a request asks for, and which token follows a context."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import msgspec

from dynamo_local.core.errors import BadRequestError, RequestError

# Next token of a context: a deterministic function of the adapter and all token ids, in order, and nothing else.
#
# A context is folded into 64 bits, one token at a time, so a token costs O(1), and a request that is replayed
# from its prompt and the tokens accepted so far continues as it would have. The same in every process.

START = 0x9E3779B97F4A7C15
"""State of the empty context, without an adapter."""

_MASK = 2**64 - 1
_FOLD = 0xD1342543DE82EF95  # odd: multiplying by it can be undone
_DRAW = 0xBF58476D1CE4E5B9


def start_of(adapter: str | None) -> int:
    """State of the empty context with that LoRA adapter. There is one for each name."""
    return START if adapter is None else int.from_bytes(blake2b(adapter.encode(), digest_size=8).digest())


def absorb(token_ids: Iterable[int], state: int = START) -> int:
    """State of the context after these tokens (each in 0 to 2**63 - 1).

    Folding a given token in is a bijection of states: contexts that differ in one token differ in state.
    """
    for token_id in token_ids:
        state = (state ^ token_id) * _FOLD & _MASK
        state ^= state >> 32
    return state


def draw(state: int, vocab_size: int) -> int:
    """The token that follows a context in this state, in range(vocab_size)."""
    mixed = state * _DRAW & _MASK
    return (mixed >> 32) * vocab_size >> 32


def continuation(prompt_token_ids: Sequence[int], n: int, vocab_size: int, adapter: str | None = None) -> list[int]:
    """The first n tokens that any mocker engine gives for this prompt, unless stopped: the tests' oracle."""
    state = absorb(prompt_token_ids, start_of(adapter))
    token_ids: list[int] = []
    for _ in range(n):
        token_ids.append(draw(state, vocab_size))
        state = absorb(token_ids[-1:], state)
    return token_ids


# Sampling parameters of a request: the fields of vLLM's SamplingParams that mean something without a model.
#
# Others (temperature, seed, penalties and so on) are passed over: a token follows from its context alone. vLLM
# leaves defaults out when it encodes, so the defaults here are vLLM's.


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
