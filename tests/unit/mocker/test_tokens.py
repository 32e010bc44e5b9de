from __future__ import annotations

import subprocess
import sys
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.engine.mocker.tokens import absorb, continuation, draw

TOKEN_IDS = st.integers(0, 2**63 - 1)
PROMPTS = st.lists(TOKEN_IDS, max_size=40)
VOCAB_SIZES = st.integers(1, 2**31)


@given(PROMPTS, st.integers(0, 60), VOCAB_SIZES)
def test_a_replay_from_any_position_continues_identically(prompt: list[int], n: int, vocab_size: int) -> None:
    original = continuation(prompt, n, vocab_size)
    assert len(original) == n
    for k in range(n + 1):
        assert continuation(prompt + original[:k], n - k, vocab_size) == original[k:]


@given(PROMPTS, VOCAB_SIZES)
def test_tokens_are_of_the_vocabulary(prompt: list[int], vocab_size: int) -> None:
    assert all(0 <= token_id < vocab_size for token_id in continuation(prompt, 20, vocab_size))


@given(PROMPTS, PROMPTS)
def test_a_context_can_be_absorbed_in_pieces(first: list[int], second: list[int]) -> None:
    assert absorb(second, absorb(first)) == absorb(first + second)


@given(PROMPTS, TOKEN_IDS, TOKEN_IDS, PROMPTS)
def test_one_different_token_is_never_forgotten(before: list[int], one: int, other: int, after: list[int]) -> None:
    assert (absorb([*before, one, *after]) == absorb([*before, other, *after])) == (one == other)


def test_order_and_length_of_the_context_count() -> None:
    contexts = [[], [0], [0, 0], [1, 2, 3], [3, 2, 1], [1, 2, 3, 0], [0, 1, 2, 3]]
    assert len({tuple(continuation(context, 16, 256)) for context in contexts}) == len(contexts)


def test_the_whole_vocabulary_is_drawn_about_evenly_and_without_a_cycle() -> None:
    counts = Counter(continuation([1], 64_000, 256))
    assert len(counts) == 256
    assert max(counts.values()) < 2 * min(counts.values())
    state, seen = absorb([1]), set()
    for _ in range(10_000):
        seen.add(state)
        state = absorb([draw(state, 256)], state)
    assert len(seen) == 10_000


def test_another_process_draws_the_same_tokens() -> None:
    # Workers of one fleet, and a test and the workers it checks, are different processes.
    code = "from dynamo_local.engine.mocker.tokens import continuation; print(continuation([1, 2, 3], 8, 256))"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.strip() == str(continuation([1, 2, 3], 8, 256))
