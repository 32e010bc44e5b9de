"""Prompts: exact lengths, repeatable, equal beginnings exactly where they are asked for."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.load.workload.prompts import WORDS, Alphabet, Prompts
from dynamo_local.load.workload.workload import Planned

IDS = Alphabet(range(100, 1000), 0)
BLOCK = 512


def prompt(index: int, planned: Planned, seed: int = 0) -> list[int]:
    found = json.loads(Prompts(IDS, seed).write(index, planned))
    assert isinstance(found, list)
    return found


def shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return sum(1 for _ in pairs)


@given(st.integers(1, 3000), st.integers(0, 9), st.floats(0, 1), st.integers(0, 3))
def test_lengths_are_exact_and_ids_are_of_the_vocabulary(tokens: int, blocks: int, share: float, index: int) -> None:
    found = prompt(index, Planned(0, tokens, 1, tuple(range(blocks)), int(tokens * share)))
    assert len(found) == tokens
    assert set(found) <= set(range(100, 1000))


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
    st.integers(1, BLOCK),
    st.integers(1, BLOCK),
)
def test_prompts_share_the_blocks_that_they_begin_with(a: list[int], b: list[int], last_a: int, last_b: int) -> None:
    first = prompt(0, Planned(0, BLOCK * (len(a) - 1) + last_a, 1, tuple(a)))
    second = prompt(1, Planned(0, BLOCK * (len(b) - 1) + last_b, 1, tuple(b)))
    equal_blocks = shared(a, b)
    wanted = min(BLOCK * equal_blocks, len(first), len(second))
    # What follows is drawn independently: a few tokens may be equal by chance.
    assert wanted <= shared(first, second) <= wanted + 5


@given(st.integers(0, 500), st.integers(0, 500))
def test_a_group_begins_alike_and_goes_on_differently(first_share: int, second_share: int) -> None:
    first = prompt(0, Planned(0, 600, 1, (), first_share, group=1))
    second = prompt(1, Planned(0, 600, 1, (), second_share, group=1))
    other = prompt(2, Planned(0, 600, 1, (), second_share, group=2))
    wanted = min(first_share, second_share)
    assert wanted <= shared(first, second) <= wanted + 5
    assert shared(other, second) <= 5


def test_the_seed_and_the_index_make_the_prompt() -> None:
    planned = Planned(0, 50, 1)
    assert prompt(0, planned) == prompt(0, planned)
    assert shared(prompt(0, planned), prompt(1, planned)) <= 5
    assert shared(prompt(0, planned, seed=1), prompt(0, planned, seed=2)) <= 5


def test_text_has_as_many_words_as_asked_for() -> None:
    text = json.loads(Prompts(Alphabet(WORDS, 0), 0).write(0, Planned(0, 40, 1)))
    assert len(text.split(" ")) == 40
    assert set(text.split(" ")) <= set(WORDS)


def test_a_large_vocabulary_is_used_all_over() -> None:
    letters = {int(letter) for letter in Alphabet(range(1_000_000), 0).letters(random.Random(0), 2_000_000)}
    assert len(letters) == 65_536
    assert min(letters) < 1000
    assert max(letters) > 999_000


def test_an_alphabet_without_letters_is_refused() -> None:
    with pytest.raises(ValueError, match="letters"):
        Alphabet([], 0)
