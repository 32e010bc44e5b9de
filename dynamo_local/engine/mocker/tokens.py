"""Next token of a context: a deterministic function of the adapter and all token ids, in order, and nothing else.

A context is folded into 64 bits, one token at a time, so a token costs O(1), and a request that is replayed
from its prompt and the tokens accepted so far continues as it would have. The same in every process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

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
