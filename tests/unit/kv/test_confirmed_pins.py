"""A model of decision 28: KV that is read from another machine is right, whatever the clocks say and whatever is lost.

Reader and source exchange messages that may be late, lost or doubled; the source reuses blocks as soon as no pin holds
them. What the reader counts has to be what was lent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

PIN_S = 5.0
BLOCKS = 3
FIRST = "first"
"""What the blocks hold that are lent. When they are reused, they hold something else."""


@dataclass
class Source:
    """Lends its blocks. `rate`: of its clock."""

    rate: float
    contents: list[str] = field(default_factory=lambda: [FIRST] * BLOCKS)
    ends: dict[int, float] = field(default_factory=dict)
    """End of each pin that is held, by its number, a moment of the own clock."""
    last: int = 0

    def pin(self, now: float) -> int:
        self.last += 1
        self.ends[self.last] = now * self.rate + PIN_S
        return self.last

    def confirm(self, pin: int, now: float) -> bool:
        """Whether it is held; released then. A pin whose time is over is as good as ended."""
        end = self.ends.pop(pin, None)
        return end is not None and now * self.rate < end

    def reuse(self, now: float) -> None:
        """Give the blocks to somebody else, if no pin keeps them."""
        self.ends = {pin: end for pin, end in self.ends.items() if now * self.rate < end}
        if not self.ends:
            self.contents = ["other"] * BLOCKS

    def restart(self) -> None:
        """Forget all pins and blocks, but no number."""
        self.ends, self.contents = {}, ["other"] * BLOCKS


@dataclass
class Reader:
    """Reads the blocks one by one, then asks whether the pin was held."""

    pin: int
    read: list[str] = field(default_factory=list)
    counted: list[str] | None = None

    def hear(self, held: bool) -> None:
        if held:
            self.counted = self.read


EVENTS = ("read", "ask", "deliver", "answer", "reuse", "restart", "lose", "pin by another")
events = st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from((0.0, 0.1, PIN_S / 2, PIN_S))), max_size=60)


def run(schedule: list[tuple[str, float]], rate: float, *, asks_early: bool = False) -> Reader:
    """What the reader has counted in the end. `asks_early`: it does not wait for its reads, which is wrong."""
    now, source = 0.0, Source(rate)
    reader = Reader(source.pin(now))
    questions: list[int] = []
    answers: list[bool] = []
    for event, passes_s in schedule:
        now += passes_s
        complete = len(reader.read) == BLOCKS
        if event == "read" and not complete:
            reader.read.append(source.contents[len(reader.read)])
        elif event == "ask" and (complete or asks_early):
            # Asked again where no answer has come.
            questions.append(reader.pin)
        elif event == "deliver" and questions:
            answers.append(source.confirm(questions.pop(0), now))
        elif event == "answer" and answers and complete:
            reader.hear(answers.pop(0))
        elif event == "reuse":
            source.reuse(now)
        elif event == "restart":
            source.restart()
        elif event == "lose":
            questions, answers = questions[1:], answers[1:]
        elif event == "pin by another":
            source.pin(now)
    return reader


@settings(max_examples=500)
@given(schedule=events, rate=st.floats(0.5, 2.0))
def test_what_is_counted_is_what_was_lent(schedule: list[tuple[str, float]], rate: float) -> None:
    counted = run(schedule, rate).counted
    assert counted is None or counted == [FIRST] * BLOCKS


def test_a_read_that_nothing_disturbs_is_counted() -> None:
    schedule = [("read", 0.1)] * BLOCKS + [("ask", 0.0), ("reuse", 0.0), ("deliver", 0.1), ("answer", 0.1)]
    assert run(schedule, 1.0).counted == [FIRST] * BLOCKS


def test_who_asks_before_the_read_has_ended_counts_what_was_reused() -> None:
    """The order is what makes it right: the model tells."""
    schedule = [("ask", 0.0), ("deliver", 0.0), ("reuse", 0.0), *[("read", 0.1)] * BLOCKS, ("answer", 0.0)]
    assert run(schedule, 1.0, asks_early=True).counted == ["other"] * BLOCKS
    assert run(schedule, 1.0).counted is None
