"""Any mix of requests, pulls, pins and holds, in any small cache: right tokens, promises kept, no block lost."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo_local.core.messages.work import RequestEpoch
from dynamo_local.engine.kv.leases import Key
from dynamo_local.engine.mocker.blocks import BlockHash
from dynamo_local.engine.mocker.scheduler import Scheduler
from dynamo_local.engine.mocker.sequence import Hold, Pull, Read, Sequence, StepOutcome
from dynamo_local.engine.mocker.tokens import Sampling

from .scheduling import assert_exact, greedy, tiny

LIMITS = tiny(kv_blocks=8, block_size=3, max_num_seqs=3, max_num_batched_tokens=8, max_pinned_share=0.5)
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=LIMITS.context_limit - 1)
SAMPLINGS = st.builds(greedy, st.none() | st.integers(1, 12))
SECONDS = st.integers(1, 8)


class PullsMachine(RuleBasedStateMachine):
    """A scheduler whose steps and reads begin and end in any order, among cancellations and the passing of time."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(LIMITS)
        self.sequences: list[Sequence] = []
        self.cancelled: dict[Sequence, int] = {}
        """Cancelled requests, with the number of tokens that they had."""
        self.step: StepOutcome | None = None
        self.reads: list[Read] = []
        self.promised: dict[str, tuple[list[BlockHash], list[int], float]] = {}
        self.now = 0.0
        self.numbers = 0

    @rule(prompt=PROMPTS, sampling=SAMPLINGS, priority=st.integers(0, 2), hold_s=st.integers(0, 4), data=st.data())
    def submit(self, prompt: list[int], sampling: Sampling, priority: int, hold_s: int, data: st.DataObject) -> None:
        sequence = self.scheduler.submit(prompt, sampling, priority=priority)
        self.numbers += 1
        if hold_s:
            sequence.hold = Hold(RequestEpoch(f"r{self.numbers}", 1), hold_s)
        full = (len(prompt) - 1) // LIMITS.mocker_block_size
        if full and data.draw(st.booleans()):
            start = data.draw(st.integers(0, full - 1))
            end = data.draw(st.integers(start + 1, full))
            sequence.pull = Pull("elsewhere", tuple(range(start, end)), start, self.now + data.draw(SECONDS))
        self.sequences.append(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        self.scheduler.cancel(sequence)
        self.sequences.remove(sequence)
        if sequence.hold is not None:
            self.scheduler.leases.end(Key("hold", str(sequence.hold.name)))
        assert sequence.blocks == []
        self.cancelled[sequence] = len(sequence.tokens)

    @precondition(lambda self: self.step is None)
    @rule()
    def begin(self) -> None:
        self.step = self.scheduler.begin(self.now)
        self.reads += self.step.reads
        for read in self.step.reads:
            assert len(read.sources) == len(read.targets) > 0
            assert read.sources[0] == read.start

    @precondition(lambda self: self.step is not None)
    @rule()
    def complete(self) -> None:
        assert self.step is not None
        self.scheduler.complete(self.step, self.now)
        self.step = None

    @precondition(lambda self: self.step is None and self.reads)
    @rule(data=st.data(), received=st.booleans())
    def end_read(self, data: st.DataObject, received: bool) -> None:
        self.finish(self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1))), received)

    def finish(self, read: Read, received: bool) -> None:
        """A read that failed has brought whatever else there was."""
        if not self.scheduler.is_loading(read.sequence):
            return
        hashes = read.sequence.hashes(read.pull.end, LIMITS.mocker_block_size)[read.start :]
        for block, content in zip(read.targets, hashes, strict=True):
            self.scheduler.memory.write(block, content if received else b"somebody else's ")
        self.scheduler.end_read(read, received)

    @rule(prompt=PROMPTS, seconds=SECONDS)
    def pin(self, prompt: list[int], seconds: int) -> None:
        hashes = Scheduler(LIMITS).submit(prompt, greedy(1)).hashes(len(prompt) // 3, 3)
        blocks = self.scheduler.pool.match(hashes)
        self.numbers += 1
        name = f"pin {self.numbers}"
        if self.scheduler.leases.take(Key("pin", name), blocks, self.now + seconds) is None:
            self.promised[name] = hashes[: len(blocks)], blocks, self.now + seconds

    @precondition(lambda self: self.promised)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.promised)))
        assert self.scheduler.leases.end(Key("pin", name))
        del self.promised[name]

    @rule(seconds=SECONDS)
    def let_time_pass(self, seconds: int) -> None:
        self.now += seconds
        self.scheduler.leases.expire(self.now)
        self.promised = {name: what for name, what in self.promised.items() if what[-1] > self.now}

    @invariant()
    def what_a_reader_was_promised_is_there(self) -> None:
        for hashes, blocks, _ in self.promised.values():
            written = [b for b in blocks if self.step is None or b not in self.step.filled]
            belongs = dict(zip(blocks, hashes, strict=True))
            assert self.scheduler.memory.read(written) == [belongs[block] for block in written]
        assert len(self.scheduler.leases.references) <= LIMITS.most_leased

    @invariant()
    def no_block_is_lost_or_has_two_owners(self) -> None:
        referred = {block for sequence in self.sequences for block in sequence.blocks}
        assert self.scheduler.load.kv_usage == len(referred) / LIMITS.mocker_kv_blocks
        assert all(self.scheduler.pool.references_to(block) for block in referred)

    @invariant()
    def nothing_happens_to_who_is_cancelled(self) -> None:
        for sequence, tokens in self.cancelled.items():
            assert (len(sequence.tokens), sequence.blocks) == (tokens, [])

    @invariant()
    def everybody_is_somewhere(self) -> None:
        load = self.scheduler.load
        unfinished = sum(sequence.finish is None for sequence in self.sequences)
        assert (load.running or 0) + (load.waiting or 0) == unfinished

    def teardown(self) -> None:
        """No request waits for ever: with every step that does nothing, a read has ended or time has passed."""
        if self.step is not None:
            self.complete()
        while self.scheduler.has_work or self.reads:
            self.begin()
            assert self.step is not None
            idle = not self.step.computed and not self.step.reads and not self.step.preempted
            self.complete()
            if idle:
                assert self.reads or len(self.scheduler.leases)
                for read in self.reads:
                    self.finish(read, True)
                self.reads = []
                self.let_time_pass(1)
        self.let_time_pass(100)
        assert_exact(self.sequences)
        assert all(sequence.finish is not None for sequence in self.sequences)
        assert (self.scheduler.pool.free, len(self.scheduler.leases)) == (LIMITS.mocker_kv_blocks, 0)


TestPulls = PullsMachine.TestCase
TestPulls.settings = settings(stateful_step_count=50, max_examples=150)
