from __future__ import annotations

import math
from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo_local.engine.kv.leases import Key, Leases
from tests.unit.vllm.kv.fake_pool import FakePool

TOTAL, MOST_BLOCKS, MOST_LEASES = 12, 6, 5

blocks_of_a_lease = st.lists(st.integers(0, TOTAL - 1), unique=True, min_size=1, max_size=5)


class LeasesMachine(RuleBasedStateMachine):
    """No block leaks, none is given up before its time, and the limits hold, whatever is done in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = FakePool(TOTAL)
        self.leases = Leases(self.pool, MOST_BLOCKS, MOST_LEASES)
        self.expected: dict[Key, tuple[list[int], float]] = {}
        self.now = 0.0
        self.names = 0
        self.used: list[list[int]] = []
        """Blocks that requests use."""

    @rule(blocks=blocks_of_a_lease, lasts=st.integers(0, 20), kind=st.sampled_from(["pin", "hold"]))
    def take(self, blocks: list[int], lasts: int, kind: str) -> None:
        self.names += 1
        key = Key(kind, str(self.names))  # type: ignore[arg-type]
        different = set(blocks).union(*(set(held) for held, _ in self.expected.values()))
        fits = len(different) <= MOST_BLOCKS and len(self.expected) < MOST_LEASES
        refused = self.leases.take(key, blocks, self.now + lasts)
        assert (refused is None) == fits
        if fits:
            self.expected[key] = (blocks, self.now + lasts)

    @rule(blocks=blocks_of_a_lease)
    def strand(self, blocks: list[int]) -> None:
        self.names += 1
        self.leases.strand(str(self.names), blocks)
        self.expected[Key("stray", str(self.names))] = (blocks, math.inf)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def take_again(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.expected)))
        assert self.leases.take(key, [0], self.now + 5) is not None

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.expected)))
        self.leases.end(key)
        self.leases.end(key)
        del self.expected[key]

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), count=st.integers(0, 5))
    def shrink(self, data: st.DataObject, count: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.expected)))
        blocks, until = self.expected.pop(key)
        self.leases.shrink(key, count)
        if blocks[:count]:
            self.expected[key] = (blocks[:count], until)

    @rule(blocks=st.lists(st.integers(0, TOTAL - 1), unique=True, min_size=1))
    def use(self, blocks: list[int]) -> None:
        self.pool.refer(blocks)
        self.leases.note(iter(blocks))
        self.used.append(blocks)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def use_no_more(self, data: st.DataObject) -> None:
        blocks = self.used.pop(data.draw(st.integers(0, len(self.used) - 1)))
        self.pool.give_up(blocks)
        self.leases.note(blocks)

    @rule()
    def count_what_is_kept(self) -> None:
        """Count, though not after every rule: what has changed meanwhile adds up."""
        leased = {block for blocks, _ in self.expected.values() for block in blocks}
        assert self.leases.kept() == len(leased - {block for blocks in self.used for block in blocks})

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), lasts=st.integers(0, 20))
    def end_and_take_under_the_same_name(self, data: st.DataObject, lasts: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.expected)))
        blocks, _ = self.expected.pop(key)
        self.leases.end(key)
        if self.leases.take(key, blocks, self.now + lasts) is None:
            self.expected[key] = (blocks, self.now + lasts)

    @rule(passes=st.integers(0, 10))
    def expire(self, passes: int) -> None:
        self.now += passes
        self.leases.expire(self.now)
        self.expected = {key: lease for key, lease in self.expected.items() if lease[1] > self.now}

    @invariant()
    def every_lease_has_its_references_and_nobody_else_has_any(self) -> None:
        counts = Counter(block for blocks, _ in self.expected.values() for block in blocks)
        used = Counter(block for blocks in self.used for block in blocks)
        assert self.pool.references == [counts[block] + used[block] for block in range(TOTAL)]
        assert dict(self.leases.references) == dict(counts)
        assert len(self.leases) == len(self.expected)
        assert {key: self.leases.blocks(key) for key in self.expected} == {
            key: tuple(blocks) for key, (blocks, _) in self.expected.items()
        }

    @invariant()
    def the_next_end_is_never_missed(self) -> None:
        assert self.leases.next_end <= min((until for _, until in self.expected.values()), default=math.inf)


TestLeases = LeasesMachine.TestCase


def test_those_last_in_a_lease_are_the_first_to_be_reused() -> None:
    pool = FakePool(4)
    leases = Leases(pool, 4)
    leases.take(Key("pin", "a"), [2, 1, 3], 1.0)
    leases.expire(1.0)
    assert pool.free == [0, 3, 1, 2]
