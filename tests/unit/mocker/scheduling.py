"""Requests, and a scheduler run to the end with all its invariants checked in and after every step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dynamo_local.engine.mocker.scheduler import Scheduler
from dynamo_local.engine.mocker.sequence import Sequence, StepOutcome
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.engine.mocker.tokens import Sampling, continuation

VOCAB_SIZE = 256


def tiny(**settings: float) -> MockerSettings:
    """Settings with blocks of 4 tokens and few of them."""
    keys: dict[str, Any] = {"kv_blocks": 8, "block_size": 4, "max_num_batched_tokens": 16} | settings
    return MockerSettings(**{f"mocker_{name}": value for name, value in keys.items()})


def greedy(max_tokens: int | None, **fields: Any) -> Sampling:
    return Sampling(max_tokens=max_tokens, **fields)


class Watched:
    """A scheduler under observation."""

    def __init__(self, settings: MockerSettings) -> None:
        self.settings = settings
        self.scheduler = Scheduler(settings)
        self.salts: dict[Sequence, str | None] = {}
        """Salts of all requests that are not finished or cancelled."""
        self.outcomes: list[StepOutcome] = []

    def submit(self, token_ids: list[int], sampling: Sampling, **how: Any) -> Sequence:
        sequence = self.scheduler.submit(token_ids, sampling, **how)
        self.salts[sequence] = how.get("cache_salt")
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        self.scheduler.cancel(sequence)
        self.salts.pop(sequence, None)
        assert sequence.blocks == []
        self.check_blocks()

    def step(self, now: float = 0.0) -> StepOutcome:
        before = {sequence: len(sequence.tokens) for sequence in self.salts}
        outcome = self.scheduler.begin(now)
        assert all(len(sequence.tokens) == before[sequence] for sequence in before)
        self.check_blocks()
        self.scheduler.complete(outcome, now)
        self.outcomes.append(outcome)
        grown = {sequence for sequence in before if len(sequence.tokens) > before[sequence]}
        assert set(outcome.emitted) == grown
        assert all(len(sequence.tokens) == before[sequence] + 1 for sequence in grown)
        self.check_work(outcome)
        self.check_contents()
        for sequence in grown:
            if sequence.finish is not None:
                assert sequence.blocks == []
                del self.salts[sequence]
        self.check_blocks()
        return outcome

    def run(self) -> None:
        """Step to the end of all requests, which is sure to come: every step computes something."""
        while self.scheduler.has_work:
            self.step()
        assert self.salts == {}
        assert self.scheduler.load.kv_usage == 0.0

    def check_work(self, outcome: StepOutcome) -> None:
        work, budget = sum(outcome.computed.values()), self.settings.mocker_max_num_batched_tokens
        assert work <= budget
        assert work > 0 or self.kept
        if work < budget and not self.kept:
            running = {sequence for sequence in self.salts if sequence.blocks}
            assert running <= set(outcome.emitted), "somebody could have been given more"
        assert all(count > 0 for count in outcome.computed.values())
        assert len(outcome.computed) <= self.settings.mocker_max_num_seqs
        assert not set(outcome.preempted) & (set(outcome.computed) | set(outcome.admitted))
        assert outcome.prefill_tokens + outcome.decode_seqs == work

    def check_blocks(self) -> None:
        block_size = self.settings.mocker_block_size
        used: dict[int, tuple[str | None, tuple[int, ...], bool]] = {}
        for sequence, salt in self.salts.items():
            assert sequence.computed <= min(len(sequence.tokens), len(sequence.blocks) * block_size)
            for index, block in enumerate(sequence.blocks):
                end = (index + 1) * block_size
                content = salt, tuple(sequence.tokens[:end]), sequence.computed >= end
                if block in used:
                    assert used[block] == content, "two contexts in one block"
                    assert content[-1], "a shared block is being written"
                used[block] = content
        load = self.scheduler.load
        assert load.kv_usage == len(used) / self.settings.mocker_kv_blocks
        assert load.running is not None
        assert load.waiting is not None
        assert load.running + load.waiting == len(self.salts)
        assert load.running == sum(bool(sequence.blocks) for sequence in self.salts)

    def check_contents(self) -> None:
        """Between two steps each block holds what belongs there."""
        block_size = self.settings.mocker_block_size
        for sequence in self.salts:
            full = sequence.computed // block_size
            assert self.scheduler.memory.read(sequence.blocks[:full]) == sequence.hashes(full, block_size)

    @property
    def kept(self) -> bool:
        """Whether blocks are kept from requests that could run with them."""
        return len(self.scheduler.leases.references) > 0

    @property
    def preemptions(self) -> int:
        return sum(len(outcome.preempted) for outcome in self.outcomes)


def assert_exact(sequences: Iterable[Sequence]) -> None:
    """Check that requests have the tokens that the oracle says, whatever happened to them on the way."""
    for sequence in sequences:
        prompt = sequence.tokens[: sequence.prompt_tokens]
        assert sequence.tokens[sequence.prompt_tokens :] == continuation(prompt, sequence.drawn, VOCAB_SIZE)
