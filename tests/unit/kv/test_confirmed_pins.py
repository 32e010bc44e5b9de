"""Decision 28: KV that is read from another machine is right, whatever the clocks say and whatever is lost.

The source's pins and the reader's rule are the product's own (PullSource, Confirmations). Between them, messages may be
late, lost or doubled; the source's clock has a speed of its own, and it reuses blocks as soon as no pin holds them.
What the reader counts has to be what was lent.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_local.engine.kv.confirmations import Confirmations
from dynamo_local.engine.vllm.kv.pull.messages import Pinned
from dynamo_local.engine.vllm.kv.source import PullSource, StepFence

PIN_S = 5.0
HASHES = (b"a", b"b", b"c")
RANKS = 2
REQUEST = "request"


class Pool:
    """Blocks with references. Those without may be given to somebody else at any moment."""

    def __init__(self) -> None:
        self.contents: list[bytes] = list(HASHES)
        self.references = [0] * len(HASHES)
        self.total = 2 * len(HASHES)

    def refer(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.references[block] += 1

    def give_up(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.references[block] -= 1

    def references_to(self, block: int) -> int:
        return self.references[block]

    def find(self, block_hash: bytes) -> int | None:
        return self.contents.index(block_hash) if block_hash in self.contents else None

    def stands(self, block: int, block_hash: bytes) -> bool:
        return self.contents[block] == block_hash

    def reuse(self) -> None:
        for block, references in enumerate(self.references):
            if not references:
                self.contents[block] = b"other"

    def compute_again(self) -> None:
        """Have free blocks hold what was lent once more, each in another one's place."""
        free = [block for block, references in enumerate(self.references) if not references]
        if len(free) == len(HASHES):
            self.contents = [*HASHES[1:], HASHES[0]]


@dataclass
class Source:
    """An engine with its worker. `rate`: of its clock."""

    rate: float
    now: float = 0.0
    pool: Pool = field(default_factory=Pool)
    pins: PullSource = field(init=False)
    names: count[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self._open()

    def _open(self) -> None:
        self.pins = PullSource(self.pool, StepFence(), lambda: self.now * self.rate)

    def pin(self) -> tuple[str, Pinned]:
        name = f"pin.{next(self.names)}"
        return name, self.pins.pin(name, HASHES, self.now * self.rate + PIN_S).result()

    def reuse(self) -> None:
        self.pins.expire()
        self.pool.reuse()

    def restart(self) -> None:
        """Forget all pins and blocks, but give no name twice."""
        self.pool = Pool()
        self.pool.reuse()
        self._open()


@dataclass
class Reader:
    """Reads by ranks, block by block. Asks as soon as its rule lets it, and counts as that says."""

    name: str
    blocks: tuple[int, ...]
    asks_early: bool = False
    read: list[list[bytes]] = field(default_factory=lambda: [[] for _ in range(RANKS)])
    confirmations: Confirmations = field(default_factory=lambda: Confirmations(RANKS))
    ended: Future[bool] = field(init=False)
    counted: list[list[bytes]] | None = None

    def __post_init__(self) -> None:
        self.confirmations.begin(REQUEST, self.name, until=1e9)
        self.ended = self.confirmations.ended(self.name)

    def read_on(self, rank: int, contents: Sequence[bytes]) -> None:
        done = self.read[rank]
        if len(done) < len(self.blocks):
            done.append(contents[self.blocks[len(done)]])
            if len(done) == len(self.blocks):
                self.confirmations.note({REQUEST: 1})

    def may_ask(self) -> bool:
        return self.asks_early or (self.ended.done() and self.ended.result())

    def hear(self, *, held: bool) -> None:
        self.confirmations.settle(self.name, held)
        verdict = self.confirmations.take().get(REQUEST, False)
        if verdict:
            self.counted = self.read


EVENTS = (
    "read", "other rank reads", "ask", "deliver", "answer", "reuse", "compute again", "restart", "lose",
    "pin by another", "question again", "unpin",
)  # fmt: skip
PASSES_S = (0.0, 0.1, PIN_S / 2, PIN_S)
events = st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from(PASSES_S)), max_size=60)


@dataclass
class World:
    """Source, reader, and the messages under way."""

    source: Source
    reader: Reader
    questions: list[str] = field(default_factory=list)
    answers: list[bool] = field(default_factory=list)

    def happens(self, event: str) -> None:
        source, reader = self.source, self.reader
        if event == "read":
            reader.read_on(0, source.pool.contents)
        elif event == "other rank reads":
            reader.read_on(1, source.pool.contents)
        elif event == "ask" and reader.may_ask():
            self.questions.append(reader.name)
        elif event == "deliver" and self.questions:
            self.answers.append(source.pins.confirm(self.questions.pop(0)))
        elif event == "answer" and self.answers:
            reader.hear(held=self.answers.pop(0))
        elif event == "lose":
            self.questions, self.answers = self.questions[1:], self.answers[1:]
        else:
            self._at_source(event)

    def _at_source(self, event: str) -> None:
        source = self.source
        if event == "reuse":
            source.reuse()
        elif event == "compute again":
            source.pool.compute_again()
        elif event == "restart":
            source.restart()
        elif event in ("pin by another", "question again"):
            # A question that is delivered again gets a pin of another name.
            source.pin()
        elif event == "unpin":
            source.pins.release([self.reader.name], [])


def run(schedule: list[tuple[str, float]], rate: float = 1.0, *, asks_early: bool = False) -> Reader:
    """What the reader has counted in the end. `asks_early`: it does not wait for its reads, which is wrong."""
    source = Source(rate)
    name, pinned = source.pin()
    world = World(source, Reader(name, pinned.blocks, asks_early))
    for event, passes_s in schedule:
        source.now += passes_s
        world.happens(event)
    return world.reader


READ = [(event, 0.1) for event in ("read", "other rank reads") for _ in HASHES]
RIGHT = [list(HASHES)] * RANKS


@settings(max_examples=500)
@given(schedule=events, rate=st.floats(0.5, 2.0))
def test_what_is_counted_is_what_was_lent(schedule: list[tuple[str, float]], rate: float) -> None:
    counted = run(schedule, rate).counted
    assert counted is None or counted == RIGHT


@settings(max_examples=500)
@given(
    between=st.lists(st.lists(st.sampled_from(EVENTS[5:]), max_size=3), min_size=len(READ) + 3, max_size=len(READ) + 3),
    passes=st.lists(st.sampled_from(PASSES_S), min_size=len(READ) + 3, max_size=len(READ) + 3),
)
def test_a_whole_read_among_anything_is_right_or_does_not_count(between: list[list[str]], passes: list[float]) -> None:
    """The same, with schedules that nearly always come to a verdict."""
    steps = [*(event for event, _ in READ), "ask", "deliver", "answer"]
    schedule = [
        (event, passes_s if index == 0 else 0.0)
        for step, others, passes_s in zip(steps, between, passes, strict=True)
        for index, event in enumerate([step, *others])
    ]
    counted = run(schedule).counted
    assert counted is None or counted == RIGHT


def test_a_read_that_nothing_disturbs_is_counted() -> None:
    assert run([*READ, ("ask", 0.0), ("reuse", 0.0), ("deliver", 0.1), ("answer", 0.1)]).counted == RIGHT


def test_a_pin_is_confirmed_once() -> None:
    reader = run([*READ, ("ask", 0.0), ("ask", 0.0), ("deliver", 0.1), ("answer", 0.0), ("deliver", 0.0)])
    assert reader.counted == RIGHT
    world = World(Source(1.0), reader)
    world.source.pin()
    assert world.source.pins.confirm("pin.0")
    assert not world.source.pins.confirm("pin.0")


def test_who_asks_before_the_read_has_ended_does_not_count_it() -> None:
    schedule = [("ask", 0.0), ("deliver", 0.0), ("answer", 0.0), ("reuse", 0.0), *READ]
    assert run(schedule, asks_early=True).counted is None


def test_while_one_rank_reads_the_source_is_not_asked() -> None:
    reader = run([READ[0]] * len(HASHES))
    assert not reader.may_ask()
    for _ in HASHES:
        reader.read_on(1, HASHES)
    assert reader.may_ask()


def test_the_first_word_about_a_read_counts() -> None:
    reader = run(READ)
    reader.hear(held=False)
    reader.hear(held=True)
    assert reader.counted is None


def test_a_read_that_nobody_settles_does_not_count() -> None:
    confirmations = Confirmations(1)
    confirmations.begin(REQUEST, "pin", until=5.0)
    confirmations.note({REQUEST: 1})
    confirmations.expire(4.9)
    assert not confirmations.take()
    confirmations.expire(5.0)
    assert confirmations.take() == {REQUEST: False}
    assert not confirmations.take()
    confirmations.settle("pin", held=True)
    assert not confirmations.take()
    confirmations.forget(REQUEST)
    assert len(confirmations) == 0


def test_who_waits_for_a_read_is_told_when_it_is_settled() -> None:
    confirmations = Confirmations(1)
    asking = confirmations.ended("pin")
    confirmations.begin(REQUEST, "pin", until=5.0)
    assert not asking.done()
    confirmations.settle("pin", held=False)
    assert asking.result() is False
    assert confirmations.ended("pin").result() is False


def test_a_read_that_has_failed_on_one_rank_is_settled_for_all() -> None:
    """The source is not asked, and who asks for the end hears that there is none."""
    confirmations = Confirmations(RANKS)
    asking = confirmations.ended("pin")
    confirmations.begin(REQUEST, "pin", until=5.0)
    confirmations.fail([REQUEST, "unknown"])
    assert asking.result() is False
    assert confirmations.take() == {REQUEST: False}
    confirmations.note({REQUEST: 1})
    confirmations.settle("pin", held=True)
    assert not confirmations.take()
