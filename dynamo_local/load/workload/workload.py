"""What is asked for, and when: arrivals and lengths put together, or a trace made to measure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from dynamo_local.load.workload.arrivals import Arrivals
from dynamo_local.load.workload.lengths import Lengths

BLOCK_TOKENS = 512
"""Tokens in a block of a trace's prompts."""


class Planned(msgspec.Struct, frozen=True):
    """One request to come."""

    at_s: float
    """When it is to be sent, since the start of the load."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Names of the blocks that the prompt consists of: the same name is the same tokens. Beyond them it is unique."""
    shared_tokens: int = 0
    """So many tokens at the start of the prompt are those that all prompts of its group begin with."""
    group: int = 0


@dataclass(frozen=True)
class Sharing:
    """A part of each prompt that others begin with, too, as system prompts and documents are."""

    share: float = 0.0
    """Of the prompt's length, 0 to 1."""
    groups: int = 1
    """Different beginnings, each as often as any other."""


@dataclass(frozen=True)
class Lengthwise:
    """Requests of independent lengths."""

    input: Lengths
    output: Lengths
    sharing: Sharing = Sharing()

    @property
    def longest(self) -> int:
        """No request needs a longer context."""
        return self.input.longest + self.output.longest

    def requests(self, times: Iterable[float], draw: random.Random) -> Iterator[Planned]:
        """One for each time."""
        for at_s in times:
            prompt, output = self.input.draw(draw), self.output.draw(draw)
            group = draw.randrange(self.sharing.groups)
            yield Planned(at_s, prompt, output, (), int(prompt * self.sharing.share), group)


def drawn(arrivals: Arrivals, shape: Lengthwise, duration_s: float, seed: int) -> Iterator[Planned]:
    """Requests that arrive before `duration_s`. Arrivals and lengths have random numbers of their own, so that two
    loads with the same seed differ only in what was asked to differ."""
    times = itertools.takewhile(lambda at_s: at_s < duration_s, arrivals.times(random.Random(f"{seed}/arrivals")))
    return shape.requests(times, random.Random(f"{seed}/lengths"))


def endless(shape: Lengthwise, seed: int) -> Iterator[Planned]:
    """Requests without times, for a load that sends the next one when one has ended."""
    return shape.requests(itertools.repeat(0.0), random.Random(f"{seed}/lengths"))


@dataclass(frozen=True)
class Cut:
    """What is taken of a trace."""

    speed: float = 1.0
    """Arrivals come so many times faster than recorded."""
    duration_s: float | None = None
    """Of the load, not of the trace."""
    max_input: int | None = None
    max_output: int | None = None

    def apply(self, trace: Iterable[Planned]) -> list[Planned]:
        """The requests as they are to be sent."""
        return [
            self._one(planned)
            for planned in trace
            if self.duration_s is None or planned.at_s / self.speed < self.duration_s
        ]

    def _one(self, planned: Planned) -> Planned:
        prompt = min(planned.input_tokens, self.max_input or planned.input_tokens)
        return msgspec.structs.replace(
            planned,
            at_s=planned.at_s / self.speed,
            input_tokens=prompt,
            output_tokens=min(planned.output_tokens, self.max_output or planned.output_tokens),
            blocks=planned.blocks[: -(-prompt // BLOCK_TOKENS)],
        )
