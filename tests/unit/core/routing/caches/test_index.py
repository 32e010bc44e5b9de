"""The prefix index against a plain model of caches: what workers tell, what is lost on the way, what comes."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Iterable, Sequence
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_local.core.messages.kv import KvChanges
from dynamo_local.core.routing.caches.index import AssumedCaches, ComingPrefixes, PrefixIndex, pack

WORKERS = "abc"
keys = st.integers(0, 9)
contexts = st.lists(keys, unique=True, max_size=6)
workers = st.sampled_from(WORKERS)


class Cache:
    """A worker with its cache, its messages, and how it repeats its state."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.held: set[int] = set()
        self.number = 0

    def change(self, removed: Iterable[int], stored: Iterable[int], *, cleared: bool = False) -> KvChanges:
        if cleared:
            self.held.clear()
        gone = set(removed) & self.held
        new = set(stored) - self.held - gone
        self.held = (self.held - gone) | new
        self.number += 1
        return KvChanges(self.worker, self.number, pack(sorted(gone)), pack(sorted(new)), cleared)

    def repeat(self, parts: int) -> list[KvChanges]:
        held = sorted(self.held)
        return [
            KvChanges(self.worker, self.number, stored=pack(held[part::parts]), part=part, parts=parts)
            for part in range(parts)
        ]


def leading(held: set[int], context: Sequence[int]) -> int:
    return next((depth for depth, key in enumerate(context) if key not in held), len(context))


def expected(held: dict[str, set[int]], context: Sequence[int]) -> dict[str, int]:
    found = {worker: leading(blocks, context) for worker, blocks in held.items()}
    return {worker: depth for worker, depth in found.items() if depth}


changes = st.tuples(st.just("change"), workers, contexts, contexts, st.booleans(), st.booleans())
repetitions = st.tuples(st.just("repeat"), workers, st.integers(1, 3), st.integers(0, 3))
losses = st.tuples(st.just("forget"), workers)
histories = st.lists(changes | repetitions | losses, max_size=30)


@settings(max_examples=300)
@given(histories, contexts)
def test_of_workers_in_step_exactly_what_they_hold_is_known(
    history: list[tuple[object, ...]], asked: list[int]
) -> None:
    index, caches = PrefixIndex(), {worker: Cache(worker) for worker in WORKERS}
    # Nobody can know of a message that is lost before another one comes.
    unnoticed = set[str]()
    for event in history:
        match event:
            case ("change", str(worker), list(removed), list(stored), bool(cleared), bool(lost)):
                message = caches[worker].change(removed, stored, cleared=cleared)
                unnoticed.add(worker)
                if not lost:
                    unnoticed.discard(worker)
                    assert index.apply(message) == index.in_step(worker)
            case ("repeat", str(worker), int(parts), int(lost_part)):
                for message in caches[worker].repeat(parts):
                    if message.part != lost_part:
                        index.apply(message)
                if lost_part >= parts:
                    unnoticed.discard(worker)
                    assert index.in_step(worker)
            case ("forget", str(worker)):
                index.forget(worker)
                unnoticed.discard(worker)
                caches[worker] = Cache(worker)
    held = {worker: caches[worker].held for worker in caches if index.in_step(worker) and worker not in unnoticed}
    found = {worker: depth for worker, depth in index.cached(pack(asked)).items() if worker in held}
    assert found == expected(held, asked)


def chain(draws: Sequence[int]) -> list[int]:
    """A context: each key names all blocks before it, as real ones do."""
    return [int("1" + "".join(map(str, draws[: depth + 1]))) for depth in range(len(draws))]


chains = st.lists(st.integers(0, 2), max_size=6).map(chain)
under_way = st.tuples(st.just("expect"), workers, chains)
ends = st.tuples(st.just("end"), st.integers(0, 20))
deaths = st.tuples(st.just("forget"), workers)


@settings(max_examples=300)
@given(st.lists(under_way | ends | deaths, max_size=30), st.lists(chains, max_size=3), chains)
def test_blocks_that_come_count_until_the_last_request_with_them_ends(
    history: list[tuple[object, ...]], stored: list[list[int]], asked: list[int]
) -> None:
    index, requests = PrefixIndex(), list[tuple[str, list[int]]]()
    for event in history:
        match event:
            case ("expect", str(worker), list(context)):
                index.expect(worker, pack(context))
                requests.append((worker, context))
            case ("end", int(number)) if number < len(requests):
                worker, context = requests.pop(number)
                index.expect_no_more(worker, pack(context))
            case ("forget", str(worker)):
                index.forget(worker)
                gone = [context for of, context in requests if of == worker]
                requests = [each for each in requests if each[0] != worker]
                for context in gone:
                    index.expect_no_more(worker, pack(context))
    held = {worker: {key for of, context in requests if of == worker for key in context} for worker in WORKERS}
    for worker, context in zip(WORKERS, stored, strict=False):
        index.replace(worker, (), context[:-1])
        held[worker] |= set(context[:-1])
    assert index.cached(pack(asked)) == expected(held, asked)


@given(st.lists(st.tuples(st.sampled_from([1, 2, 4]), chains), max_size=20), st.randoms(use_true_random=False))
def test_of_contexts_that_have_all_ended_nothing_is_left(requests: list[tuple[int, list[int]]], draw: Random) -> None:
    coming = ComingPrefixes()
    for bit, context in requests:
        coming.add(bit, pack(context))
    draw.shuffle(requests)
    while requests:
        bit, context = requests.pop()
        coming.remove(bit, pack(context))
        for _, other in requests:
            assert sum(blocks for blocks, _ in coming.along(pack(other))) == len(other)
            # Runs are as long as they can be: neighbours differ in who has them.
            assert len(list(coming.along(pack(other)))) <= len(requests)
    assert (
        not list(coming.along(pack(chain([0]))))
        + list(coming.along(pack(chain([1]))))
        + list(coming.along(pack(chain([2]))))
    )


def test_a_context_that_does_not_come_to_the_worker_cannot_be_taken_back() -> None:
    index = PrefixIndex()
    context = pack(chain([0, 1, 2]))
    index.expect("a", context)
    index.expect("b", pack(chain([0, 1])))
    for worker, other in (("b", context), ("c", context), ("a", pack(chain([0, 1, 1]))), ("a", pack([7]))):
        index.expect_no_more(worker, other)
    assert index.cached(context) == {"a": 3, "b": 2}


def test_what_is_held_and_what_comes_make_one_prefix() -> None:
    index = PrefixIndex()
    index.apply(KvChanges("a", 1, stored=pack([1, 3])))
    index.expect("a", pack([1, 2]))
    assert index.cached(pack([1, 2, 3, 4])) == {"a": 3}


def test_a_lost_message_is_noticed_and_a_repetition_mends_it() -> None:
    index, cache = PrefixIndex(), Cache("a")
    assert index.apply(cache.change([], [1, 2]))
    cache.change([2], [3])
    assert not index.apply(cache.change([], [4]))
    assert not index.in_step("a")
    for message in cache.repeat(2):
        assert index.apply(message)
    assert index.in_step("a")
    assert index.cached(pack([1, 3, 4, 2])) == {"a": 3}


def test_changes_that_come_twice_or_late_change_nothing() -> None:
    index, cache = PrefixIndex(), Cache("a")
    messages = [cache.change([], [1]), cache.change([1], [2])]
    repetition = Cache("a").repeat(1)
    for message in [*messages, *messages, *repetition]:
        assert index.apply(message)
    assert index.cached(pack([2])) == {"a": 1}
    assert index.cached(pack([1])) == {}


def test_a_worker_that_was_there_before_is_not_in_step_until_it_has_repeated_all() -> None:
    index, cache = PrefixIndex(), Cache("a")
    cache.change([], [1])
    assert not index.apply(cache.change([], [2]))
    assert index.apply(cache.repeat(1)[0])
    assert index.cached(pack([1, 2])) == {"a": 2}


def test_a_dead_worker_leaves_nothing() -> None:
    index = PrefixIndex()
    for worker in WORKERS:
        index.apply(KvChanges(worker, 1, stored=pack(range(100))))
        index.expect(worker, pack(range(50, 150)))
    for worker in WORKERS:
        index.forget(worker)
    assert len(index) == 0
    assert index.cached(pack(range(50, 60))) == {}
    index.apply(KvChanges("d", 1, stored=pack([7])))
    assert index.cached(pack([7])) == {"d": 1}


def test_there_is_a_bound() -> None:
    index = PrefixIndex(most_blocks=10)
    index.apply(KvChanges("a", 1, stored=pack(range(100))))
    assert len(index) == 10
    assert index.cached(pack(range(100))) == {"a": 10}
    index.apply(KvChanges("a", 2, removed=pack(range(100))))
    assert len(index) == 0


def test_a_block_takes_less_than_200_bytes() -> None:
    blocks = 20_000
    tracemalloc.start()
    index = PrefixIndex()
    for number in range(8):
        stored = [(number * blocks + each) * (2**64 // (9 * blocks)) for each in range(blocks)]
        index.apply(KvChanges(f"worker {number}", 1, stored=pack(stored)))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 200 * len(index)
    assert sys.getsizeof(index) < taken


@given(st.lists(contexts, max_size=10), st.integers(0, 8))
def test_a_worker_without_events_is_taken_for_what_was_last_used(assigned: list[list[int]], room: int) -> None:
    index = PrefixIndex()
    assumed = AssumedCaches(index)
    used: list[int] = []
    for context in assigned:
        assumed.use("a", context, room)
        used = [*[key for key in used if key not in context], *reversed(context)][-room:] if room else []
        for key in range(10):
            assert (index.cached(pack([key])) == {"a": 1}) == (key in used)
