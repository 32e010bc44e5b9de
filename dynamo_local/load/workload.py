"""Workloads: planned requests from arrivals and lengths, or from a published trace, and their prompts. Pure but for
traces, whose lines are given; random numbers are passed in."""

from __future__ import annotations

import csv
import itertools
import math
import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

import msgspec

from dynamo_local.core.errors import UsageError
from dynamo_local.load.quantities import parse_count, parse_duration, parse_number, shown_duration

# Arrival times of requests, as point processes.

RATE_SYNTAX = "5, constant:5, gamma:5:2.5 (rate and coefficient of variation) or sine:1-10:60s (rates and period)"


class Arrivals(Protocol):
    """An infinite arrival process."""

    def times(self, draw: random.Random) -> Iterator[float]:
        """Yield arrival times in seconds since the start, ascending and without end."""
        ...


@dataclass(frozen=True)
class Constant:
    """An arrival every 1 / rate seconds, the first at 0."""

    rate: float

    def times(self, draw: random.Random) -> Iterator[float]:
        index = 0
        while True:
            yield index / self.rate  # not a sum of gaps, which would drift
            index += 1

    def __str__(self) -> str:
        return f"{self.rate:g} requests/s at constant distances"


@dataclass(frozen=True)
class Gamma:
    """A renewal process whose gaps have mean 1 / rate and the coefficient of variation `cv`.

    With cv 1 it is the Poisson process (independent users); above 1 requests come in bursts, below 1 more evenly.
    """

    rate: float
    cv: float = 1.0

    def times(self, draw: random.Random) -> Iterator[float]:
        shape = 1 / self.cv**2
        scale = 1 / (shape * self.rate)
        at_s = 0.0
        while True:
            at_s += draw.gammavariate(shape, scale)
            yield at_s

    def __str__(self) -> str:
        return f"{self.rate:g} requests/s, " + ("Poisson" if self.cv == 1 else f"Gamma with CV {self.cv:g}")


@dataclass(frozen=True)
class Sinusoid:
    """A Poisson process whose rate is a sine between two values, rising from their mean at the start.

    Drawn by thinning (Lewis and Shedler, Simulation of nonhomogeneous Poisson processes by thinning, 1979).
    """

    low: float
    high: float
    period_s: float

    def rate_at(self, at_s: float) -> float:
        middle, swing = (self.high + self.low) / 2, (self.high - self.low) / 2
        return middle + swing * math.sin(2 * math.pi * at_s / self.period_s)

    def times(self, draw: random.Random) -> Iterator[float]:
        at_s = 0.0
        while True:
            at_s += draw.expovariate(self.high)
            if draw.random() * self.high < self.rate_at(at_s):
                yield at_s

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g} requests/s, Poisson, in a sine of {shown_duration(self.period_s)}"


def parse_arrivals(text: str) -> Arrivals:
    """Parse a rate such as `5`, `constant:5` or `sine:1-10:60s`. Raises UsageError."""
    kind, *rest = text.split(":") if ":" in text else ("poisson", text)
    match kind, rest:
        case "poisson", [rate]:
            return Gamma(_rate(rate))
        case "constant", [rate]:
            return Constant(_rate(rate))
        case "gamma", [rate, cv]:
            return Gamma(_rate(rate), parse_number(cv, "coefficient of variation", above=0))
        case "sine", [rates, period]:
            low, _, high = rates.partition("-")
            swing = Sinusoid(parse_number(low, "lower rate", at_least=0), _rate(high), parse_duration(period))
            if swing.low > swing.high:
                raise UsageError(f"the lower rate of {text!r} is above the higher one")
            return swing
    raise UsageError(f"{text!r} is not a rate", f"write {RATE_SYNTAX}")


def _rate(text: str) -> float:
    return parse_number(text, "rate", above=0)


# Distributions of the lengths of prompts and answers.

LENGTH_SYNTAX = "512, 100-2000 (evenly) or power:2.0:16-4000 (n tokens as often as n ** -2.0)"


class Lengths(Protocol):
    """A distribution of lengths in tokens."""

    @property
    def longest(self) -> int:
        """Maximum length."""
        ...

    def draw(self, draw: random.Random) -> int: ...


@dataclass(frozen=True)
class Uniform:
    """Equally frequent lengths from `shortest` to `longest`."""

    shortest: int
    longest: int

    def draw(self, draw: random.Random) -> int:
        return draw.randint(self.shortest, self.longest)

    def __str__(self) -> str:
        return str(self.longest) if self.shortest == self.longest else f"{self.shortest}-{self.longest}"


@dataclass(frozen=True)
class PowerLaw:
    """A bounded power law with density proportional to x ** -exponent: most lengths are short, few are very long.

    Drawn on the real line from `shortest` to `longest` + 1 by inverting the distribution function, and rounded down.
    """

    exponent: float
    shortest: int
    longest: int

    def draw(self, draw: random.Random) -> int:
        low, high, share = float(self.shortest), self.longest + 1.0, draw.random()
        power = 1 - self.exponent
        if abs(power) < 1e-9:
            value = low * (high / low) ** share
        else:
            # Relative to `low`, so that large exponents do not underflow.
            value = low * (1 + share * math.expm1(power * math.log(high / low))) ** (1 / power)
        return min(max(int(value), self.shortest), self.longest)

    def __str__(self) -> str:
        return f"power:{self.exponent:g}:{self.shortest}-{self.longest}"


def parse_lengths(text: str, what: str) -> Lengths:
    """Parse a length such as `512`, `100-2000` or `power:2.0:16-4000`. `what` names it in errors. Raises UsageError."""
    match text.split(":"):
        case [bounds]:
            return Uniform(*_bounds(bounds, what))
        case ["power", exponent, bounds]:
            power = parse_number(exponent, f"exponent of {what}", above=0)
            if power > 20:
                raise UsageError(f"exponent of {what} must be at most 20, not {exponent}")
            return PowerLaw(power, *_bounds(bounds, what))
    raise UsageError(f"{what}: {text!r} is not a length", f"write {LENGTH_SYNTAX}")


def _bounds(text: str, what: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    shortest = parse_count(low, what)
    longest = parse_count(high, what) if dash else shortest
    if shortest > longest:
        raise UsageError(f"{what}: {text!r} begins above its end")
    return shortest, longest


# Plans requests: from arrivals and lengths, or from a trace that is scaled and cut.

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


# Reads published request traces: the Azure LLM inference traces and those of Mooncake.

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    """Arrival in milliseconds since the start."""
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    """Ids of the prompt's blocks of 512 tokens. Equal ids mean equal contents, also of all blocks before."""


def parse_trace(lines: Iterable[str]) -> list[Planned]:
    """Read the requests of a trace in either format, ordered by arrival, the first at 0. Raises UsageError."""
    rows = iter(lines)
    first = next(rows, "").lstrip("\ufeff")
    if first.startswith("{"):
        found = list(_mooncake(_chained(first, rows)))
    elif tuple(first.strip().split(",")) == _AZURE_COLUMNS:
        found = list(_azure(rows))
    else:
        raise UsageError(
            "the trace has no format known here",
            f"it must be CSV that begins with {','.join(_AZURE_COLUMNS)}, or JSON lines with timestamp, input_length, "
            "output_length and perhaps hash_ids",
        )
    if not found:
        raise UsageError("the trace has no requests")
    found.sort(key=lambda planned: planned.at_s)
    begin_s = found[0].at_s
    return [msgspec.structs.replace(planned, at_s=planned.at_s - begin_s) for planned in found]


def _chained(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _mooncake(rows: Iterator[str]) -> Iterator[Planned]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for number, row in enumerate(rows, 1):
        if not row.strip():
            continue
        try:
            line = decoder.decode(row)
        except msgspec.DecodeError as error:
            raise UsageError(f"line {number} of the trace: {error}") from error
        yield _planned(number, line.timestamp / 1e3, line.input_length, line.output_length, line.hash_ids)


def _azure(rows: Iterator[str]) -> Iterator[Planned]:
    for number, row in enumerate(csv.reader(rows), 2):
        if not row:
            continue
        try:
            timestamp, context, generated = row
            at = datetime.fromisoformat(timestamp)
            lengths = int(context), int(generated)
        except ValueError as error:
            raise UsageError(f"line {number} of the trace: {error}") from error
        yield _planned(number, (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp(), *lengths)


def _planned(number: int, at_s: float, prompt: int, output: int, blocks: Sequence[int] = ()) -> Planned:
    """Return a request. Empty prompts and answers, which APIs refuse, get one token. Raises UsageError."""
    if prompt < 0 or output < 0:
        raise UsageError(f"line {number} of the trace: a length is negative")
    return Planned(at_s, max(1, prompt), max(1, output), tuple(blocks))


# Writes prompts: random but repeatable, of exact length, with shared prefixes and blocks as planned.

_NOUNS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work night point home water room mother area money story "
    "fact month lot right study book eye job word business issue side kind head house service friend father power hour "
    "game line end member law car city name team minute idea body back face others level office door health person art "
    "war history party result change morning reason research girl guy moment air teacher force education"
)
WORDS = tuple(_NOUNS.split())
"""Words that are one token for most tokenizers."""

_TABLE_SIZE = 1 << 16


class Alphabet:
    """The letters of prompts: token ids, or words. Of more than 65,536, a random sample of that size is used."""

    def __init__(self, letters: Sequence[int] | Sequence[str], seed: int) -> None:
        if not letters:
            raise ValueError("an alphabet needs letters")
        self.is_text = isinstance(letters[0], str)
        used = (
            letters if len(letters) <= _TABLE_SIZE else random.Random(f"{seed}/alphabet").sample(letters, _TABLE_SIZE)
        )
        encoded = [str(letter).encode() for letter in used]
        # Filled to 2**16 entries: a 16-bit random number is an index, ten times cheaper than random.choices.
        self._table = [encoded[index % len(encoded)] for index in range(_TABLE_SIZE)]

    def letters(self, draw: random.Random, count: int) -> list[bytes]:
        """Draw letters, encoded as in JSON. With the same state of `draw`, fewer letters are a prefix of more."""
        even = count + count % 2  # random.randbytes is a prefix of a longer one only in whole words of 4 bytes
        numbers = array("H", draw.randbytes(2 * even))
        return list(map(self._table.__getitem__, numbers[:count]))


class Prompts:
    """Writes the prompt of each planned request as JSON: an array of token ids, or a string."""

    def __init__(self, alphabet: Alphabet, seed: int) -> None:
        self._alphabet = alphabet
        self._seed = seed

    def write(self, index: int, planned: Planned) -> bytes:
        """Write the prompt of a request. Its unshared part depends on `index`."""
        letters: list[bytes] = []
        for part, count in self._parts(index, planned):
            letters += self._alphabet.letters(random.Random(f"{self._seed}/{part}"), count)
        if self._alphabet.is_text:
            return b'"' + b" ".join(letters) + b'"'
        return b"[" + b",".join(letters) + b"]"

    def _parts(self, index: int, planned: Planned) -> Iterator[tuple[str, int]]:
        """Yield the parts of the prompt: a name that seeds the part, and its length in tokens."""
        left = planned.input_tokens
        if planned.shared_tokens:
            yield f"group/{planned.group}", planned.shared_tokens
            left -= planned.shared_tokens
        for block in planned.blocks:
            if left <= 0:
                return
            yield f"block/{block}", min(BLOCK_TOKENS, left)
            left -= BLOCK_TOKENS
        if left > 0:
            yield f"request/{index}", left
