from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo_local.engine.mocker.kv.blocks import BlockPool
from dynamo_local.engine.mocker.kv.pins import Pins

TOTAL, MOST = 8, 5
HASHES = [bytes([i]) for i in range(TOTAL)]


class PinsMachine(RuleBasedStateMachine):
    """Pins that come, end and are ended, while requests take and give back every block they can get."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.pins = Pins(self.pool, MOST)
        self.now = 0.0
        self.promised: dict[int, tuple[list[int], list[bytes], float]] = {}
        """By name: blocks, their hashes, and until when nobody takes them."""
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
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(hashes=st.lists(st.sampled_from(HASHES), unique=True), seconds=st.integers(0, 5))
    def pin(self, hashes: list[bytes], seconds: int) -> None:
        blocks = self.pool.match(hashes)
        self.names += 1
        fits = len(self.kept() | set(blocks)) <= MOST
        assert self.pins.add(self.names, blocks, self.now + seconds) == fits
        if fits:
            self.promised[self.names] = blocks, hashes[: len(blocks)], self.now + seconds

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        name = data.draw(st.integers(0, self.names))
        assert self.pins.remove(name) == (self.promised.pop(name, None) is not None)

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.999, 3.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds
        over = [name for name, (*_, until) in self.promised.items() if until <= self.now]
        assert self.pins.expire(self.now) == bool(over)
        for name in over:
            del self.promised[name]

    @invariant()
    def every_promise_is_kept(self) -> None:
        for name, (blocks, hashes, _) in self.promised.items():
            assert name in self.pins
            assert self.pool.match(hashes) == blocks
        assert self.pool.pinned == len(self.kept()) <= MOST

    @invariant()
    def the_next_end_is_known(self) -> None:
        assert self.pins.next_end == min((until for *_, until in self.promised.values()), default=None)

    def kept(self) -> set[int]:
        return {block for blocks, *_ in self.promised.values() for block in blocks}

    def teardown(self) -> None:
        for blocks in self.held:
            self.pool.release(blocks)
        assert self.pool.free == TOTAL - len(self.kept())
        self.pins.expire(self.now + 10)
        assert (self.pool.free, self.pool.pinned, self.pins.next_end) == (TOTAL, 0, None)


TestPins = PinsMachine.TestCase
