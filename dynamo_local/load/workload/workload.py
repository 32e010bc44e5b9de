"""Plans requests: from arrivals and lengths, or from a trace that is scaled and cut."""

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
    """A planned request."""

    at_s: float
    """Time of sending, in seconds since the start of the load."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of the prompt's blocks: equal ids mean equal tokens. The prompt is unique beyond its blocks."""
    shared_tokens: int = 0
    """Length of the prefix that the prompt shares with the others of its group, in tokens."""
    group: int = 0


@dataclass(frozen=True)
class Sharing:
    """Shared prefixes of prompts, as system prompts and documents are."""

    share: float = 0.0
    """Length of the prefix as a share of the prompt's length, 0 to 1."""
    groups: int = 1
    """Number of different prefixes, all equally frequent."""


@dataclass(frozen=True)
class Lengthwise:
    """Requests of independent lengths."""

    input: Lengths
    output: Lengths
    sharing: Sharing = Sharing()

    @property
    def longest(self) -> int:
        """Maximum length of a request: prompt and answer, in tokens."""
        return self.input.longest + self.output.longest

    def requests(self, times: Iterable[float], draw: random.Random) -> Iterator[Planned]:
        """Yield a request for each time."""
        for at_s in times:
            prompt, output = self.input.draw(draw), self.output.draw(draw)
            group = draw.randrange(self.sharing.groups)
            yield Planned(at_s, prompt, output, (), int(prompt * self.sharing.share), group)


def drawn(arrivals: Arrivals, shape: Lengthwise, duration_s: float, seed: int) -> Iterator[Planned]:
    """Yield the requests that arrive before `duration_s`. Arrivals and lengths have separate random numbers, so that a
    changed rate does not change the lengths of a load with the same seed."""
    times = itertools.takewhile(lambda at_s: at_s < duration_s, arrivals.times(random.Random(f"{seed}/arrivals")))
    return shape.requests(times, random.Random(f"{seed}/lengths"))


def endless(shape: Lengthwise, seed: int) -> Iterator[Planned]:
    """Yield requests without times, for a closed loop."""
    return shape.requests(itertools.repeat(0.0), random.Random(f"{seed}/lengths"))


@dataclass(frozen=True)
class Cut:
    """Scaling and limits applied to a trace."""

    speed: float = 1.0
    """Factor by which arrivals are faster than recorded."""
    duration_s: float | None = None
    """Duration of the load (not of the trace)."""
    max_input: int | None = None
    max_output: int | None = None

    def apply(self, trace: Iterable[Planned]) -> list[Planned]:
        """Return the requests to send."""
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
