from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core import codec
from dynamo_local.core.messages.kv import HotBlock, HotPrefixesAnswer, Origin
from dynamo_local.core.routing.caches.hot_prefixes import MOST_DEPTH, HotPrefixes

HALF_LIFE_S = 10.0
NOBODY, ALICE = Origin(), Origin("alice", "pirate")

contexts = st.tuples(st.sampled_from([NOBODY, ALICE]), st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=6))
asked = st.lists(st.tuples(contexts, st.integers(0, 5).map(lambda lives: lives * HALF_LIFE_S)), max_size=40)
"""At whole half-lives, so that sums of counts are exact in any order."""

Asked = Sequence[tuple[tuple[Origin, list[bytes]], float]]


def counted(requests: Asked, most_blocks: int = 1_000) -> HotPrefixes:
    hot = HotPrefixes(most_blocks, HALF_LIFE_S)
    for (origin, blocks), at in sorted(requests, key=lambda each: each[1]):
        hot.ask(origin, blocks, at)
    return hot


def told_heats(told: HotPrefixesAnswer) -> dict[tuple[Origin, tuple[bytes, ...]], float]:
    """The heat of each prefix. Fails if a block comes before the one that it stands under."""
    prefixes: list[tuple[Origin, tuple[bytes, ...]]] = []
    for place, block in enumerate(told.blocks):
        assert block.parent < place
        origin, above = prefixes[block.parent] if block.parent >= 0 else (told.origins[-1 - block.parent], ())
        prefixes.append((origin, (*above, block.tokens)))
    return {prefix: block.heat for prefix, block in zip(prefixes, told.blocks, strict=True)}


@given(asked)
def test_a_prefix_is_as_hot_as_the_requests_that_begin_with_it_each_halved_with_its_age(requests: Asked) -> None:
    now = 60.0
    expected: dict[tuple[Origin, tuple[bytes, ...]], float] = {}
    for (origin, blocks), at in requests:
        for depth in range(1, len(blocks) + 1):
            prefix = (origin, tuple(blocks[:depth]))
            expected[prefix] = expected.get(prefix, 0.0) + 2.0 ** ((at - now) / HALF_LIFE_S)
    assert told_heats(counted(requests).tell(1_000, 4, now)) == pytest.approx(expected)


@given(asked, st.integers(0, 30), st.randoms(use_true_random=False))
def test_what_is_hottest_does_not_depend_on_the_order_of_requests(requests: Asked, most: int, draw: object) -> None:
    shuffled = list(requests)
    draw.shuffle(shuffled)  # type: ignore[attr-defined]
    other = HotPrefixes(1_000, HALF_LIFE_S)
    # A time before the epoch counts less than one.
    for (origin, blocks), at in shuffled:
        other.ask(origin, blocks, at)
    one = counted(requests)
    assert told_heats(one.tell(most, 4, 60.0)) == pytest.approx(told_heats(other.tell(most, 4, 60.0)))
    assert one.chains(most, 60.0) == other.chains(most, 60.0)


@given(asked, st.integers(1, 12), st.integers(0, 12))
def test_memory_is_bounded_and_what_is_kept_begins_at_the_beginning(requests: Asked, bound: int, most: int) -> None:
    hot = HotPrefixes(bound, HALF_LIFE_S)
    for (origin, blocks), at in requests:
        hot.ask(origin, blocks, at)
        assert len(hot) <= bound
    told = hot.tell(most, 4, 60.0)
    assert len(told.blocks) <= most
    heats = told_heats(told)
    for origin, prefix in heats:
        assert len(prefix) == 1 or heats[origin, prefix[:-1]] >= heats[origin, prefix]


@given(asked, asked)
def test_what_two_have_told_adds_up_to_what_both_were_asked(one: Asked, other: Asked) -> None:
    both = HotPrefixes(1_000, HALF_LIFE_S)
    for requests in (one, other):
        told = codec.decode(codec.encode(counted(requests).tell(1_000, 4, 60.0)), HotPrefixesAnswer)
        both.add(told, 60.0)
    expected = counted([*one, *other]).tell(1_000, 4, 60.0)
    assert told_heats(both.tell(1_000, 4, 60.0)) == pytest.approx(told_heats(expected))


@given(asked, st.integers(0, 30), st.sampled_from([0.0, 1.0, 2.0]))
def test_chains_cover_the_hottest_blocks_and_each_comes_behind_what_it_begins_with(
    requests: Asked, most: int, least: float
) -> None:
    hot = counted(requests)
    heats = told_heats(hot.tell(most, 4, 60.0))
    wanted = {prefix for prefix, heat in heats.items() if heat >= least}
    chains = hot.chains(most, 60.0, least)
    covered = {(each.origin, each.blocks[:depth]) for each in chains for depth in range(1, len(each.blocks) + 1)}
    assert covered == wanted
    for place, chain in enumerate(chains):
        assert all(chain.origin != e.origin or chain.blocks[: len(e.blocks)] != e.blocks for e in chains[place + 1 :])


def test_the_hottest_beginning_comes_first_and_its_continuations_follow() -> None:
    hot = HotPrefixes(half_life_s=HALF_LIFE_S)
    for own in (b"1", b"2", b"2"):
        hot.ask(NOBODY, [b"system", b"prompt", own], 0.0)
    hot.ask(ALICE, [b"system"], 0.0)
    chains = [(each.origin, each.blocks, each.heat) for each in hot.chains(100, 0.0)]
    assert chains[:2] == [(NOBODY, (b"system", b"prompt"), 3.0), (NOBODY, (b"system", b"prompt", b"2"), 2.0)]
    assert {origin for origin, _, _ in chains[2:]} == {NOBODY, ALICE}


def test_counts_of_years_overflow_nothing() -> None:
    hot = HotPrefixes(half_life_s=1.0)
    for second in range(0, 10_000, 100):
        hot.ask(NOBODY, [b"a"], float(second))
    assert [chain.heat for chain in hot.chains(1, 9_900.0)] == [pytest.approx(1.0)]


def test_the_depth_of_a_context_is_bounded() -> None:
    hot = HotPrefixes()
    hot.ask(NOBODY, [b"%d" % index for index in range(MOST_DEPTH + 5)], 0.0)
    assert len(hot) == MOST_DEPTH


def test_an_answer_that_cannot_be_understood_ends_where_it_cannot() -> None:
    hot = HotPrefixes()
    hot.add(
        HotPrefixesAnswer(4, (NOBODY,), (HotBlock(-1, b"a", 2.0), HotBlock(5, b"b", 1.0), HotBlock(0, b"c", 1.0))), 0
    )
    hot.add(HotPrefixesAnswer(4, (), (HotBlock(-1, b"d", 2.0),)), 0)
    assert [chain.blocks for chain in hot.chains(10, 0)] == [(b"a",)]
