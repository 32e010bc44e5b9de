"""What one run of an arm brought, cycle of the load by cycle. Pure arithmetic."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.planner.device_time import Held, device_seconds
from dynamo_local.load.figures import Record
from dynamo_local.load.workload import Sinusoid


class Swing(msgspec.Struct, frozen=True):
    """The load: a Poisson process whose rate swings between `low` and `high` requests a second in a sine. It begins
    and ends with the lowest rate, after `cycles` periods."""

    low: float
    high: float
    period_s: float
    cycles: int

    @property
    def seconds(self) -> float:
        return self.cycles * self.period_s

    def times(self, draw: random.Random) -> Iterator[float]:
        """As `dynamo_local.load.workload.Arrivals`: without end."""
        lowest_s = 0.75 * self.period_s
        for at_s in Sinusoid(self.low, self.high, self.period_s).times(draw):
            if at_s >= lowest_s:
                yield at_s - lowest_s


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """A request of the load. Times are seconds, those of day since the start of the load; None: it never came so
    far."""

    at_s: float
    ttft_s: float | None
    itl_s: float | None
    e2e_s: float | None
    tokens: int
    error: str = ""


def answer_of(record: Record) -> Answer:
    """What is kept of a record."""
    return Answer(record.at_s, record.ttft_s, record.itl_s, record.e2e_s, record.tokens, record.error)


class Made(msgspec.Struct, frozen=True, array_like=True):
    """A change that the planner made, or tried to: `at_s` is when it was decided, since the start of the load."""

    at_s: float
    change: str
    took_s: float
    done: bool


class Outing(msgspec.Struct, frozen=True):
    """A run of an arm under the load that `seed` draws."""

    arm: str
    seed: int
    swing: Swing
    settings: dict[str, str]
    """What differs from the arm's usual settings."""
    answers: list[Answer]
    held: list[Held]
    changes: list[Made]
    busy_cores: float
    """Of the whole machine, whoever used them."""

    @property
    def label(self) -> str:
        return " ".join((self.arm, *(f"{key}={value}" for key, value in sorted(self.settings.items()))))


class Limits(msgspec.Struct, frozen=True):
    """The objective: no request may take longer, in seconds."""

    ttft_s: float
    itl_s: float


@dataclass(frozen=True)
class Cycle:
    """The requests that were to be sent within one period, and what was held meanwhile."""

    answers: tuple[Answer, ...]
    device_s: float
    seconds: float
    limits: Limits

    @property
    def devices(self) -> float:
        return self.device_s / self.seconds

    @property
    def completed(self) -> tuple[Answer, ...]:
        return tuple(answer for answer in self.answers if not answer.error)

    @property
    def failed(self) -> int:
        return len(self.answers) - len(self.completed)

    @property
    def first_in_time(self) -> int:
        """Requests whose first token came in time."""
        return sum(self._first_in_time(answer) for answer in self.completed)

    @property
    def steady(self) -> int:
        """Requests whose tokens came in time from then on."""
        return sum(self._steady(answer) for answer in self.completed)

    @property
    def good(self) -> int:
        """Requests that kept both limits."""
        return sum(self._first_in_time(answer) and self._steady(answer) for answer in self.completed)

    @property
    def good_per_device_hour(self) -> float:
        return 3600 * self.good / self.device_s

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.completed)

    @property
    def ttfts_s(self) -> list[float]:
        return [answer.ttft_s for answer in self.completed if answer.ttft_s is not None]

    @property
    def itls_s(self) -> list[float]:
        return [answer.itl_s for answer in self.completed if answer.itl_s is not None]

    @property
    def e2es_s(self) -> list[float]:
        return [answer.e2e_s for answer in self.completed if answer.e2e_s is not None]

    def _first_in_time(self, answer: Answer) -> bool:
        return answer.ttft_s is not None and answer.ttft_s <= self.limits.ttft_s

    def _steady(self, answer: Answer) -> bool:
        return answer.itl_s is None or answer.itl_s <= self.limits.itl_s


def cycles_of(outing: Outing, limits: Limits) -> list[Cycle]:
    """The periods, from one lowest rate to the next."""
    swing = outing.swing
    found = []
    for number in range(swing.cycles):
        begin, end = number * swing.period_s, (number + 1) * swing.period_s
        within = tuple(answer for answer in outing.answers if begin <= answer.at_s < end)
        found.append(Cycle(within, device_seconds(outing.held, begin, end), swing.period_s, limits))
    return found


def together(cycles: Sequence[Cycle]) -> Cycle:
    """Several cycles as one."""
    return Cycle(
        tuple(answer for cycle in cycles for answer in cycle.answers),
        math.fsum(cycle.device_s for cycle in cycles),
        math.fsum(cycle.seconds for cycle in cycles),
        cycles[0].limits,
    )
