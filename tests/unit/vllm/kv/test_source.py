from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo_local.engine.vllm.kv.pull.messages import LONGEST_LEASE_S, Pinned
from dynamo_local.engine.vllm.kv.source import PartialBlock, PullSource, StepFence, find_partial_block
from tests.unit.vllm.kv.fake_pool import FakePool

CHAIN = [bytes([number]) for number in range(6)]
"""Hashes of one context's blocks."""

MOST_IN_FLIGHT = 2


@dataclass
class Question:
    hashes: list[bytes]
    until: float
    answer: Future[Pinned]


class EngineMachine(RuleBasedStateMachine):
    """An engine that schedules up to two steps ahead, under memory pressure, and answers pins meanwhile.

    What a pin's answer counts is written when it is answered, and stays as it is until the pin ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pool = FakePool(8)
        self.fence = StepFence()
        self.source = PullSource(self.pool, self.fence, lambda: self.now)
        self.in_flight: deque[list[tuple[int, bytes]]] = deque()
        self.used: list[list[int]] = []
        self.questions: dict[str, Question] = {}

    @precondition(lambda self: len(self.in_flight) < MOST_IN_FLIGHT)
    @rule(start=st.integers(0, 5), count=st.integers(1, 3))
    def schedule_a_step(self, start: int, count: int) -> None:
        self.fence.schedule()
        self.source.expire()
        written = []
        for block_hash in CHAIN[start : start + count]:
            block = self.pool.allocate(block_hash)
            if block is not None:
                written.append((block, block_hash))
        self.in_flight.append(written)
        self.used.append([block for block, _ in written])

    @precondition(lambda self: self.in_flight)
    @rule(fails=st.booleans())
    def end_a_step(self, fails: bool) -> None:
        for block, block_hash in self.in_flight.popleft():
            if fails:
                self.pool.take_back(block)
            else:
                self.pool.write(block, block_hash)
        self.fence.end()

    @precondition(lambda self: len(self.used) > len(self.in_flight))
    @rule()
    def finish_a_request(self) -> None:
        self.pool.give_up(self.used.pop(0))

    @precondition(lambda self: len(self.used) > len(self.in_flight))
    @rule(hold_s=st.integers(1, 10))
    def finish_a_request_and_hold_it(self, hold_s: int) -> None:
        blocks = self.used.pop(0)
        if blocks:
            self.source.hold(f"h{blocks}{self.now}", blocks, hold_s)
        self.pool.give_up(blocks)

    @rule(count=st.integers(1, 6), lasts=st.integers(1, 10))
    def pin(self, count: int, lasts: int) -> None:
        name = str(len(self.questions))
        answer = self.source.pin(name, CHAIN[:count], self.now + lasts)
        self.questions[name] = Question(CHAIN[:count], self.now + lasts, answer)

    @precondition(lambda self: self.questions)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.questions)))
        self.source.release([name], [])
        self.questions[name].until = self.now

    @rule(passes=st.integers(0, 5))
    def pass_time(self, passes: int) -> None:
        self.now += passes

    @invariant()
    def what_is_pinned_is_written_and_stays(self) -> None:
        for question in self.questions.values():
            if question.answer.done() and self.now < question.until:
                blocks = question.answer.result().blocks
                assert [self.pool.contents[block] for block in blocks] == question.hashes[: len(blocks)]

    @invariant()
    def nobody_waits_for_steps_that_have_ended(self) -> None:
        if not self.in_flight:
            assert all(question.answer.done() for question in self.questions.values())

    def teardown(self) -> None:
        """Every block is free once everything is over."""
        while self.in_flight:
            self.end_a_step(fails=False)
        while self.used:
            self.finish_a_request()
        self.now += LONGEST_LEASE_S
        self.source.expire()
        assert sorted(self.pool.free) == list(range(8))


TestEngine = EngineMachine.TestCase


def filled(pool: FakePool, hashes: list[bytes]) -> list[int]:
    blocks = []
    for block_hash in hashes:
        block = pool.allocate(block_hash)
        assert block is not None
        pool.write(block, block_hash)
        blocks.append(block)
    return blocks


def written(pool: FakePool) -> int:
    """A block that a request writes to, and that no hash stands for."""
    (block,) = filled(pool, [b"tail"])
    pool.take_back(block)
    return block


def source_of(pool: FakePool, fence: StepFence | None = None) -> PullSource:
    return PullSource(pool, fence or StepFence(), lambda: 0.0)


def test_a_pin_during_a_step_is_answered_when_the_step_has_ended() -> None:
    pool, fence = FakePool(20), StepFence()
    source = source_of(pool, fence)
    fence.schedule()
    block = pool.allocate(CHAIN[0])
    assert block is not None
    fence.schedule()
    answer = source.pin("p", CHAIN, 5.0)
    fence.schedule()
    assert not answer.done()
    fence.end()
    assert not answer.done()
    fence.end()
    assert answer.result() == Pinned((block,))


def test_a_pin_between_steps_is_answered_at_once() -> None:
    pool = FakePool(20)
    blocks = filled(pool, CHAIN[:3])
    assert source_of(pool).pin("p", CHAIN, 5.0).result() == Pinned(tuple(blocks))


def test_what_a_failed_step_takes_back_is_not_counted() -> None:
    pool, fence = FakePool(20), StepFence()
    source = source_of(pool, fence)
    good, bad, _ = filled(pool, CHAIN[:3])
    fence.schedule()
    answer = source.pin("p", CHAIN, 5.0)
    pool.take_back(bad)
    fence.end()
    assert answer.result() == Pinned((good,))
    assert pool.references[bad] == 1


def test_a_pin_that_was_released_before_it_was_answered_counts_nothing() -> None:
    pool, fence = FakePool(20), StepFence()
    source = source_of(pool, fence)
    filled(pool, CHAIN[:3])
    fence.schedule()
    answer = source.pin("p", CHAIN, 5.0)
    source.release(["p"], [])
    fence.end()
    assert answer.result().blocks == ()
    assert answer.result().refused


def test_a_tail_is_kept_behind_the_whole_prefix() -> None:
    pool = FakePool(20)
    blocks, tail = filled(pool, CHAIN[:3]), written(pool)
    source = source_of(pool)
    assert source.pin("p", CHAIN[:3], 5.0, PartialBlock(tail, 7, lambda: True)).result() == Pinned(
        (*blocks, tail), rest=7
    )
    assert pool.references[tail] == 2
    source.release(["p"], [])
    assert pool.references[tail] == 1


def test_a_tail_behind_a_gap_is_not() -> None:
    pool = FakePool(20)
    blocks, tail = filled(pool, CHAIN[:3]), written(pool)
    assert source_of(pool).pin("p", CHAIN, 5.0, PartialBlock(tail, 7, lambda: True)).result() == Pinned(tuple(blocks))
    assert pool.references[tail] == 1


def test_a_tail_that_is_gone_when_all_is_written_is_not_given_away() -> None:
    pool, fence, there = FakePool(20), StepFence(), [True]
    source = source_of(pool, fence)
    blocks, tail = filled(pool, CHAIN[:3]), written(pool)
    fence.schedule()
    answer = source.pin("p", CHAIN[:3], 5.0, PartialBlock(tail, 7, lambda: there[0]))
    assert pool.references[tail] == 2, "nobody writes to it meanwhile but its request"
    there[0] = False
    fence.end()
    assert answer.result() == Pinned(tuple(blocks))
    assert pool.references[tail] == 1


def test_a_tail_is_not_given_away_when_a_block_before_it_is_taken_back() -> None:
    pool, fence = FakePool(20), StepFence()
    source = source_of(pool, fence)
    (_, _, bad), tail = filled(pool, CHAIN[:3]), written(pool)
    fence.schedule()
    answer = source.pin("p", CHAIN[:3], 5.0, PartialBlock(tail, 7, lambda: True))
    pool.take_back(bad)
    fence.end()
    assert len(answer.result().blocks) == 2
    assert answer.result().rest == 0
    assert pool.references[tail] == 1


def test_no_more_than_half_of_the_pool_is_kept() -> None:
    pool = FakePool(6)
    source = source_of(pool)
    filled(pool, CHAIN)
    assert source.pin("a", CHAIN[:3], 5.0).result().refused is None
    assert source.pin("b", CHAIN[:3], 5.0).result().refused is None
    refused = source.pin("c", CHAIN[:4], 5.0).result()
    assert refused.blocks == ()
    assert refused.refused == "too much of the cache is kept for readers: 3 of at most 3 blocks"


def test_nothing_cached_is_said_so() -> None:
    assert source_of(FakePool(4)).pin("p", CHAIN, 5.0).result() == Pinned((), "nothing of it is cached")


def test_a_step_cannot_end_that_was_not_scheduled() -> None:
    with pytest.raises(AssertionError):
        StepFence().end()


SIZE = 4
CONTEXT = list(range(100, 111))
"""Two full blocks, and three tokens behind them."""
HASHES = [b"first", b"second"]
REST = CONTEXT[8:]


def running(**changes: Any) -> Any:
    """A request with KV of all its tokens."""
    fields = {
        "request_id": "r",
        "block_hashes": HASHES,
        "all_token_ids": CONTEXT,
        "num_computed_tokens": len(CONTEXT),
    }
    return SimpleNamespace(**{**fields, **changes})


def scheduler_of(*requests: Any) -> Any:
    blocks = {request.request_id: [10, 11, 12] for request in requests}
    return SimpleNamespace(
        running=list(requests),
        requests={request.request_id: request for request in requests},
        blocks=blocks,
        kv_cache_manager=SimpleNamespace(get_block_ids=lambda name: (blocks.get(name, []),)),
    )


def found(scheduler: Any, rest: list[int] = REST) -> tuple[int, int] | None:
    tail = find_partial_block(scheduler, SIZE, HASHES, rest)
    return None if tail is None else (tail.block, tail.tokens)


def test_a_running_request_has_what_is_behind_its_full_blocks() -> None:
    assert found(scheduler_of(running())) == (12, 3)


def test_one_that_has_come_further_has_it_too() -> None:
    further = running(block_hashes=[*HASHES, b"third"], all_token_ids=[*CONTEXT, 111, 112, 113], num_computed_tokens=13)
    assert found(scheduler_of(further)) == (12, 3)


@pytest.mark.parametrize(("computed", "tokens"), [(8, None), (9, (12, 1)), (11, (12, 3))])
def test_what_is_not_computed_is_not_there(computed: int, tokens: tuple[int, int] | None) -> None:
    assert found(scheduler_of(running(num_computed_tokens=computed))) == tokens


def test_only_what_both_have_in_common_is_there() -> None:
    assert found(scheduler_of(running(all_token_ids=[*CONTEXT[:10], 7]))) == (12, 2)
    assert found(scheduler_of(running(all_token_ids=[*CONTEXT[:8], 7, 109, 110]))) is None


def test_tokens_behind_another_context_are_others() -> None:
    assert found(scheduler_of(running(block_hashes=[HASHES[0], b"other"]))) is None
    assert found(scheduler_of(running(block_hashes=HASHES[:1]))) is None


def test_the_one_that_has_it_is_found_among_others() -> None:
    others = [running(request_id="a", block_hashes=[b"x", b"y"]), running(request_id="b", num_computed_tokens=8)]
    assert found(scheduler_of(*others, running())) == (12, 3)


@pytest.mark.parametrize("rest", [[], CONTEXT[4:8], CONTEXT])
def test_a_tail_is_a_part_of_a_block(rest: list[int]) -> None:
    assert found(scheduler_of(running()), rest) is None


def test_without_a_full_block_there_is_no_telling_whose_it_is() -> None:
    assert find_partial_block(scheduler_of(running()), SIZE, [], REST) is None


def test_it_stands_as_long_as_its_request_has_it() -> None:
    request = running()
    scheduler = scheduler_of(request)
    tail = find_partial_block(scheduler, SIZE, HASHES, REST)
    assert tail is not None
    assert tail.stands()
    request.num_computed_tokens += 20
    assert tail.stands()
    # Preempted.
    request.num_computed_tokens = 0
    assert not tail.stands()
    # Resumed, in other blocks.
    request.num_computed_tokens = len(CONTEXT)
    scheduler.blocks["r"] = [10, 11, 13]
    assert not tail.stands()


def test_it_is_not_vouched_for_once_its_request_is_over() -> None:
    scheduler = scheduler_of(running())
    tail = find_partial_block(scheduler, SIZE, HASHES, REST)
    scheduler.requests.clear()
    assert tail is not None
    assert not tail.stands()
    # Another one of that name.
    scheduler.requests["r"] = running()
    assert not tail.stands()
