"""Outcome of a step of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from dynamo_local.engine.mocker.kv.contents import Filling
from dynamo_local.engine.mocker.kv.pulling import Pull
from dynamo_local.engine.mocker.sequence import Sequence


@dataclass(frozen=True)
class Read:
    """Blocks of another engine, `sources`, are to be read into a request's blocks with indices from `start` on."""

    sequence: Sequence
    pull: Pull
    start: int

    @property
    def sources(self) -> tuple[int, ...]:
        return self.pull.blocks[self.start - self.pull.start :]

    @property
    def targets(self) -> list[int]:
        return self.sequence.blocks[self.start : self.pull.end]


@dataclass(frozen=True)
class StepOutcome:
    """Work of one step, complete or under way."""

    computed: dict[Sequence, int]
    """Tokens whose KV is computed."""
    admitted: tuple[Sequence, ...]
    preempted: tuple[Sequence, ...]
    emitted: tuple[Sequence, ...]
    """Requests that draw one token, their last one, and may be finished by it."""
    reads: tuple[Read, ...]
    """Reads that begin with the step, but are no part of it: the caller does them and reports their ends."""
    fillings: tuple[Filling, ...]

    @property
    def decode_seqs(self) -> int:
        return sum(count == 1 for count in self.computed.values())

    @property
    def prefill_tokens(self) -> int:
        return sum(self.computed.values()) - self.decode_seqs

    @property
    def filled(self) -> set[int]:
        """Blocks that are found in the cache though they are not written before the step's end."""
        return {block for filling in self.fillings for block in filling.blocks[filling.start :]}


@dataclass
class Draft:
    """A step being planned, with what is left of its budget of tokens."""

    budget: int
    computed: dict[Sequence, int] = field(default_factory=dict)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    fillings: list[Filling] = field(default_factory=list)

    def outcome(self) -> StepOutcome:
        emitted = tuple([sequence for sequence in self.computed if sequence.computed == sequence.length])
        admitted, preempted = tuple(self.admitted), tuple(self.preempted)
        return StepOutcome(self.computed, admitted, preempted, emitted, tuple(self.reads), tuple(self.fillings))
