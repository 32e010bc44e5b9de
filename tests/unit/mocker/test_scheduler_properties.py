"""Any mix of requests, in any small cache: every one gets exactly its tokens, and every block comes back."""

from __future__ import annotations

from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from dynamo_local.engine.mocker.sequence import Sequence
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.engine.mocker.tokens import Sampling

from .scheduling import Watched, assert_exact, greedy, tiny

SETTINGS = st.builds(
    tiny,
    kv_blocks=st.integers(2, 12),
    block_size=st.integers(1, 5),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 20),
)
SAMPLINGS = st.builds(
    greedy,
    st.none() | st.integers(1, 20),
    min_tokens=st.integers(0, 3),
    eos_token_id=st.none() | st.integers(0, 255),
    stop_token_ids=st.none() | st.frozensets(st.integers(0, 255), max_size=40),
)
PRIORITIES = st.integers(0, 2)
SALTS = st.sampled_from([None, "salt"])


def prompts(limits: MockerSettings) -> st.SearchStrategy[list[int]]:
    # Few distinct tokens, so that prompts share prefixes.
    return st.lists(st.integers(0, 1), min_size=1, max_size=limits.context_limit - 1)


@given(SETTINGS, st.data())
def test_every_request_gets_exactly_its_tokens(limits: MockerSettings, data: st.DataObject) -> None:
    requests = data.draw(st.lists(st.tuples(prompts(limits), SAMPLINGS, PRIORITIES, SALTS), min_size=1, max_size=15))
    watched = Watched(limits)
    sequences = [
        watched.submit(prompt, sampling, priority=priority, cache_salt=salt)
        for prompt, sampling, priority, salt in requests
    ]
    watched.run()
    event(f"preempted: {watched.preemptions > 0}")
    assert_exact(sequences)
    for sequence in sequences:
        assert_ended_rightly(sequence, limits)


def assert_ended_rightly(sequence: Sequence, limits: MockerSettings) -> None:
    sampling = sequence.sampling
    stops = {sampling.eos_token_id} | (sampling.stop_token_ids or set())
    outputs = sequence.tokens[sequence.prompt_tokens :]
    may_stop = [i >= sampling.min_tokens and token_id in stops for i, token_id in enumerate(outputs)]
    assert not any(may_stop[:-1])
    assert sequence.finish == ("stop" if may_stop[-1] else "length")
    if not may_stop[-1]:
        assert sequence.drawn == sampling.max_tokens or len(sequence.tokens) == limits.context_limit


def test_a_tiny_cache_and_many_requests() -> None:
    watched = Watched(tiny(kv_blocks=10, max_num_seqs=16, max_num_batched_tokens=32))
    sequences = [watched.submit([i % 5, i, 7], greedy(35), priority=i % 3) for i in range(60)]
    watched.run()
    assert watched.preemptions > 100
    assert_exact(sequences)
    assert all(sequence.drawn == 35 for sequence in sequences)


class SchedulerMachine(RuleBasedStateMachine):
    """Submissions, cancellations and steps in any order. Watched checks the invariants."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = tiny(kv_blocks=6, block_size=3, max_num_seqs=4, max_num_batched_tokens=8)
        self.watched = Watched(self.limits)
        self.sequences: list[Sequence] = []

    @rule(data=st.data(), sampling=SAMPLINGS, priority=PRIORITIES, salt=SALTS)
    def submit(self, data: st.DataObject, sampling: Sampling, priority: int, salt: str | None) -> None:
        prompt = data.draw(prompts(self.limits))
        self.sequences.append(self.watched.submit(prompt, sampling, priority=priority, cache_salt=salt))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        drawn = sequence.drawn
        self.watched.cancel(sequence)
        self.sequences.remove(sequence)
        assert sequence.drawn == drawn

    @precondition(lambda self: self.watched.scheduler.has_work)
    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            if self.watched.scheduler.has_work:
                self.watched.step()

    @rule()
    def empty_the_cache(self) -> None:
        """What is asked for later is computed anew, and right."""
        if self.watched.scheduler.empty_cache() is None:
            assert self.watched.scheduler.load.kv_usage == 0.0
            assert all(sequence.finish is not None for sequence in self.sequences)
        else:
            assert any(sequence.finish is None for sequence in self.sequences)

    def teardown(self) -> None:
        self.watched.run()
        assert_exact(self.sequences)
        assert all(sequence.finish is not None for sequence in self.sequences)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(stateful_step_count=40, max_examples=60)
