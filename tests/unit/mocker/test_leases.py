from __future__ import annotations

import math

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo_local.engine.kv.leases import Key, Leases
from dynamo_local.engine.mocker.blocks import BlockPool

TOTAL, MOST = 8, 5
HASHES = [bytes([i]) for i in range(TOTAL)]


class LeasesMachine(RuleBasedStateMachine):
    """Leases on the mocker's pool come and end while requests take and give back every block they can get."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.leases = Leases(self.pool, MOST)
        self.pool.report_references(self.leases.note)
        self.now = 0.0
        self.promised: dict[int, tuple[list[int], list[bytes], float]] = {}
        """Blocks by name, with their hashes and the time until which nothing else may take them."""
        self.held: list[list[int]] = []
        self.names = 0

    @rule(count=st.integers(1, TOTAL), data=st.data())
    def take_and_fill(self, count: int, data: st.DataObject) -> None:
        blocks = self.pool.allocate(min(count, self.pool.free))
        assert not set(blocks) & self.kept()
        for block in blocks:
            self.pool.register(block, data.draw(st.sampled_from(HASHES)))
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.pool.give_up(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(hashes=st.lists(st.sampled_from(HASHES), unique=True), seconds=st.integers(0, 5))
    def pin(self, hashes: list[bytes], seconds: int) -> None:
        blocks = self.pool.match(hashes)
        self.names += 1
        fits = len(self.kept() | set(blocks)) <= MOST
        assert (self.leases.take(Key("pin", str(self.names)), blocks, self.now + seconds) is None) == fits
        if fits:
            self.promised[self.names] = blocks, hashes[: len(blocks)], self.now + seconds

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        name = data.draw(st.integers(0, self.names))
        assert self.leases.end(Key("pin", str(name))) == (self.promised.pop(name, None) is not None)

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.999, 3.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds
        over = [name for name, (*_, until) in self.promised.items() if until <= self.now]
        assert self.leases.expire(self.now) == bool(over)
        for name in over:
            del self.promised[name]

    @invariant()
    def every_promise_is_kept(self) -> None:
        for name, (blocks, hashes, _) in self.promised.items():
            assert Key("pin", str(name)) in self.leases
            assert self.pool.match(hashes) == blocks
        assert set(self.leases.references) == self.kept()
        assert len(self.kept()) <= MOST
        assert self.leases.kept() == len(self.kept() - {block for blocks in self.held for block in blocks})

    @invariant()
    def the_next_end_is_known(self) -> None:
        assert self.leases.next_end <= min((until for *_, until in self.promised.values()), default=math.inf)

    def kept(self) -> set[int]:
        return {block for blocks, *_ in self.promised.values() for block in blocks}

    def teardown(self) -> None:
        for blocks in self.held:
            self.pool.give_up(blocks)
        assert self.pool.free == TOTAL - len(self.kept())
        self.leases.expire(self.now + 10)
        assert (self.pool.free, len(self.leases), self.leases.next_end) == (TOTAL, 0, math.inf)


TestLeases = LeasesMachine.TestCase
