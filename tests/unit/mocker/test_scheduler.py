from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.errors import RequestError
from dynamo_local.core.messages.presence import Load
from dynamo_local.core.messages.work import RequestEpoch
from dynamo_local.engine.mocker.scheduler import Scheduler
from dynamo_local.engine.mocker.sequence import Hold, Pull
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.engine.mocker.tokens import continuation

from .scheduling import VOCAB_SIZE, Watched, assert_exact, greedy, tiny


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


def test_one_request_from_prompt_to_length() -> None:
    watched = Watched(tiny())
    sequence = watched.submit(prompt(5), greedy(3))
    assert watched.scheduler.load == Load(running=0, waiting=1, kv_usage=0.0, kv_pinned=0.0)
    first = watched.step()
    assert (first.admitted, first.emitted, first.computed) == ([sequence], [sequence], {sequence: 5})
    assert watched.scheduler.load == Load(running=1, waiting=0, kv_usage=2 / 8, kv_pinned=0.0)
    assert watched.step().computed == {sequence: 1}
    watched.run()
    assert sequence.tokens[5:] == continuation(prompt(5), 3, VOCAB_SIZE)
    assert (sequence.finish, sequence.stop_reason) == ("length", None)


def test_a_long_prompt_is_prefilled_in_chunks_and_emits_after_the_last_one() -> None:
    watched = Watched(tiny(max_num_batched_tokens=6))
    sequence = watched.submit(prompt(14), greedy(1))
    watched.run()
    assert [outcome.computed[sequence] for outcome in watched.outcomes] == [6, 6, 2]
    assert [len(outcome.emitted) for outcome in watched.outcomes] == [0, 0, 1]
    assert [outcome.prefill_tokens for outcome in watched.outcomes] == [6, 6, 2]


def test_decodes_come_before_a_prefill_in_the_budget() -> None:
    watched = Watched(tiny(max_num_batched_tokens=6))
    decoding = watched.submit(prompt(2), greedy(9))
    watched.step()
    long = watched.submit(prompt(14, 100), greedy(1), priority=-1)
    assert watched.step().computed == {decoding: 1, long: 5}
    assert watched.step().computed == {decoding: 1, long: 5}


def test_a_prefix_is_found_in_the_cache_but_never_the_last_token() -> None:
    watched = Watched(tiny())
    watched.submit(prompt(8), greedy(1))
    watched.run()
    same = watched.submit(prompt(8), greedy(1))
    longer = watched.submit([*prompt(8), 99], greedy(1))
    outcome = watched.step()
    assert (same.cached_tokens, outcome.computed[same]) == (4, 4)
    assert (longer.cached_tokens, outcome.computed[longer]) == (8, 1)


def test_requests_admitted_in_one_step_share_their_prefix() -> None:
    watched = Watched(tiny())
    watched.submit([*prompt(4), 98], greedy(2))
    second = watched.submit([*prompt(4), 99], greedy(2))
    watched.step()
    assert second.cached_tokens == 4
    assert watched.scheduler.load.kv_usage == 3 / 8


def test_generated_tokens_are_found_in_the_cache_too() -> None:
    watched = Watched(tiny())
    first = watched.submit(prompt(3), greedy(10))
    watched.run()
    second = watched.submit(list(first.tokens), greedy(1))
    watched.run()
    # 13 tokens; the KV of the very last one was never computed.
    assert second.cached_tokens == 12


def test_salts_do_not_share() -> None:
    watched = Watched(tiny())
    watched.submit(prompt(9), greedy(1), cache_salt="a")
    watched.run()
    other, same = (watched.submit(prompt(9), greedy(1), cache_salt=salt) for salt in ("b", "a"))
    watched.run()
    assert (other.cached_tokens, same.cached_tokens) == (0, 8)


def test_admission_waits_for_the_blocks_of_a_whole_prompt() -> None:
    watched = Watched(tiny(kv_blocks=4, max_num_batched_tokens=4))
    first = watched.submit(prompt(7), greedy(5))
    second = watched.submit(prompt(9, 50), greedy(1))
    watched.step()
    assert watched.step().admitted == []
    while first.finish is None:
        assert second.computed == 0
        watched.step()
    assert watched.step().admitted == [second]


def test_no_more_run_than_there_are_places() -> None:
    watched = Watched(tiny(max_num_seqs=2))
    for first in (0, 50, 100):
        watched.submit(prompt(2, first), greedy(2))
    watched.step()
    assert watched.scheduler.load == Load(running=2, waiting=1, kv_usage=2 / 8, kv_pinned=0.0)
    watched.run()


def test_the_latest_makes_way_and_loses_nothing() -> None:
    watched = Watched(tiny(kv_blocks=4))
    first, second = (watched.submit(prompt(7, start), greedy(9)) for start in (0, 100))
    while not watched.preemptions:
        watched.step()
    assert watched.outcomes[-1].preempted == [second]
    assert watched.outcomes[-1].computed == {first: 1}
    drawn = second.drawn
    assert drawn > 0
    watched.run()
    assert_exact([first, second])
    assert (first.drawn, second.drawn) == (9, 9)


def test_one_that_made_way_finds_its_own_blocks_but_does_not_tell() -> None:
    watched = Watched(tiny(kv_blocks=5))
    _, second = (watched.submit(prompt(7, start), greedy(9)) for start in (0, 100))
    while not watched.preemptions:
        watched.step()
    while not watched.outcomes[-1].admitted:
        outcome = watched.step()
    assert outcome.computed[second] < second.prompt_tokens
    watched.run()
    assert second.cached_tokens == 0


def test_the_budget_of_one_that_made_way_goes_to_others() -> None:
    watched = Watched(tiny(kv_blocks=4, max_num_batched_tokens=4))
    low = watched.submit(prompt(2), greedy(9), priority=2)
    watched.step()
    high = watched.submit(prompt(2, 50), greedy(9), priority=0)
    watched.step()
    long = watched.submit(prompt(8, 100), greedy(1), priority=1)
    for _ in range(2):
        assert watched.step().computed == {low: 1, high: 1, long: 2}
    outcome = watched.step()
    assert (outcome.preempted, outcome.computed) == ([low], {high: 1, long: 3})
    watched.run()
    assert_exact([low, high, long])


def test_priority_decides_who_makes_way() -> None:
    watched = Watched(tiny(kv_blocks=4))
    low = watched.submit(prompt(7), greedy(9), priority=1)
    high = watched.submit(prompt(7, 100), greedy(9), priority=0)
    while not watched.preemptions:
        watched.step()
    assert watched.outcomes[-1].preempted == [low]
    watched.run()
    assert_exact([low, high])


def test_an_urgent_request_takes_the_place_of_a_less_urgent_one() -> None:
    watched = Watched(tiny(max_num_seqs=2, kv_blocks=20))
    first, second = (watched.submit([number] * 5, greedy(9)) for number in range(2))
    for _ in range(3):
        watched.step()
    urgent = watched.submit([9] * 5, greedy(3), priority=-1)
    equal = watched.submit([8] * 5, greedy(1))
    outcome = watched.step()
    assert (outcome.preempted, outcome.admitted) == ([second], [urgent])
    assert set(outcome.computed) == {first, urgent}
    watched.run()
    assert watched.preemptions == 1
    assert [len(one.tokens) for one in (first, second, urgent, equal)] == [14, 14, 8, 6]
    assert second.tokens[5:] == continuation([1] * 5, 9, VOCAB_SIZE)


def test_one_that_is_loaded_hides_no_more_urgent_one() -> None:
    scheduler = Scheduler(tiny(max_num_seqs=2, kv_blocks=20))
    loaded = scheduler.submit([7] * 5, greedy(2), priority=3)
    loaded.pull = Pull("elsewhere", (0,), 0, until=99.0)
    (read,) = scheduler.begin().reads
    running = [scheduler.submit([number] * 5, greedy(9)) for number in range(2)]
    scheduler.complete(scheduler.begin())
    scheduler.memory.write(read.targets[0], loaded.hashes(1, 4)[0])
    scheduler.end_read(read, received=True)
    assert scheduler.begin().preempted == [], "nobody is less urgent than the one that is loaded"
    urgent = scheduler.submit([9] * 5, greedy(3), priority=-1)
    outcome = scheduler.begin()
    assert (outcome.preempted, outcome.admitted) == ([running[1]], [urgent])
    scheduler.complete(outcome)
    while scheduler.has_work:
        scheduler.complete(scheduler.begin())
    assert_exact([loaded, urgent, *running])


def test_one_that_made_way_after_its_turn_computes_nothing_in_that_step() -> None:
    # `low` is first in the list of running requests, so its turn is over when `high` finds no block.
    watched = Watched(tiny(kv_blocks=4))
    low = watched.submit(prompt(6), greedy(9), priority=1)
    watched.step()
    high = watched.submit(prompt(8, 100), greedy(9), priority=0)
    outcome = watched.step()
    assert set(outcome.emitted) == {low, high}
    drawn = low.drawn
    outcome = watched.step()
    assert (outcome.preempted, outcome.computed) == ([low], {high: 1})
    assert low.drawn == drawn
    watched.run()
    assert_exact([low, high])


@pytest.mark.parametrize("length", [0, 32, 33, 100])
def test_what_can_never_run_is_refused(length: int) -> None:
    watched = Watched(tiny(max_model_len=1000))
    with pytest.raises(RequestError, match="prompt"):
        watched.submit(prompt(length), greedy(1))
    assert not watched.scheduler.has_work


@pytest.mark.parametrize("token_id", [-1, 2**63])
def test_impossible_token_ids_are_refused(token_id: int) -> None:
    with pytest.raises(RequestError, match="out of range"):
        Watched(tiny()).submit([1, token_id], greedy(1))


@pytest.mark.parametrize("max_tokens", [None, 1000])
def test_a_request_ends_at_the_context_limit(max_tokens: int | None) -> None:
    watched = Watched(tiny(max_model_len=20))
    sequence = watched.submit(prompt(5), greedy(max_tokens))
    watched.run()
    assert (len(sequence.tokens), sequence.finish) == (20, "length")


def test_one_request_may_fill_the_whole_cache() -> None:
    watched = Watched(tiny())
    others = [watched.submit(prompt(3, start), greedy(6)) for start in (50, 100)]
    sequence = watched.submit(prompt(31), greedy(None), priority=-1)
    watched.run()
    assert (len(sequence.tokens), sequence.finish) == (32, "length")
    assert_exact([sequence, *others])


class TestStopping:
    oracle = continuation(prompt(4), 60, VOCAB_SIZE)

    def run(self, **fields: object) -> tuple[int, str | None, int | None]:
        watched = Watched(MockerSettings())
        sequence = watched.submit(prompt(4), greedy(60, **fields))
        watched.run()
        assert_exact([sequence])
        return sequence.drawn, sequence.finish, sequence.stop_reason

    def test_at_the_end_of_sequence_token(self) -> None:
        assert self.run(eos_token_id=self.oracle[5]) == (6, "stop", None)

    def test_not_if_that_is_to_be_ignored(self) -> None:
        assert self.run(eos_token_id=self.oracle[5], ignore_eos=True) == (60, "length", None)

    def test_at_a_stop_token_which_is_the_reason(self) -> None:
        token_id = self.oracle[5]
        assert self.run(stop_token_ids=frozenset({token_id}), ignore_eos=True) == (6, "stop", token_id)

    def test_end_of_sequence_comes_before_stop_tokens(self) -> None:
        token_id = self.oracle[5]
        assert self.run(eos_token_id=token_id, stop_token_ids=frozenset({token_id})) == (6, "stop", None)

    def test_stop_comes_before_length(self) -> None:
        assert self.run(eos_token_id=self.oracle[-1]) == (60, "stop", None)

    @pytest.mark.parametrize(("min_tokens", "drawn"), [(5, 6), (6, 60)])
    def test_not_before_the_minimum(self, min_tokens: int, drawn: int) -> None:
        # The token is drawn all the same: it follows from the context alone.
        assert self.oracle.count(self.oracle[5]) == 1
        assert self.run(eos_token_id=self.oracle[5], min_tokens=min_tokens)[0] == drawn


def test_a_hold_keeps_blocks_that_were_found_elsewhere_until_they_went() -> None:
    watched = Watched(tiny(max_num_batched_tokens=32))
    shorter = watched.submit(prompt(7), greedy(3))
    held = watched.submit(prompt(7), greedy(5))
    held.hold = Hold(RequestEpoch("held", 1), 10.0)
    while shorter.finish is None:
        watched.step()
    # Both have filled their second blocks with the same, and those of `shorter` are the ones that are found,
    # until they are taken:
    watched.submit(prompt(20, 100), greedy(1))
    while held.finish is None:
        watched.step()
    watched.scheduler.leases.expire(9.9)
    assert watched.scheduler.load.kv_pinned == 2 / 8
    assert len(watched.scheduler.pool.match(held.hashes(2, 4))) == 2


@given(
    st.lists(st.tuples(st.integers(-1, 1), st.integers(0, 3)), min_size=1, max_size=12),
    st.integers(1, 3),
)
def test_waiting_requests_are_served_by_priority_then_arrival_then_submission(
    requests: list[tuple[int, int]], places: int
) -> None:
    watched = Watched(tiny(kv_blocks=1000, max_num_seqs=places))
    sequences = [
        watched.submit([number, 1], greedy(1), priority=priority, arrival_time=float(arrival))
        for number, (priority, arrival) in enumerate(requests)
    ]
    watched.run()
    admitted = [sequence for outcome in watched.outcomes for sequence in outcome.admitted]
    numbered = range(len(requests))
    assert admitted == [sequences[i] for i in sorted(numbered, key=lambda i: (*requests[i], i))]


def test_one_key_s_flood_does_not_keep_another_key_waiting_and_background_work_gets_in() -> None:
    watched = Watched(tiny(max_num_seqs=1))
    background = watched.submit(prompt(4), greedy(1), priority=1)
    flood = [watched.submit(prompt(4, 10 * number), greedy(1), key="flood") for number in range(30)]
    late = watched.submit(prompt(4, 400), greedy(1), key="late", arrival_time=1.0)
    watched.run()
    order = [sequence for outcome in watched.outcomes for sequence in outcome.admitted]
    assert order[:3] == [flood[0], late, flood[1]]
    assert order.index(background) < 20
