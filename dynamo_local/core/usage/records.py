"""What one HTTP request has used, as a line of a journal. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

LEFT = 499
"""Status of a request whose client has left before the end of its answer."""


class UsageRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request that generates, at the end of its answer.

    `time`: of the wall clock, in seconds since 1970. `key`: name of the API key; None where none is needed. `endpoint`:
    its name, or that of the graph's own model. `status`: of the answer, or LEFT. `cached` of the `prompt` tokens were
    in a worker's KV cache. `seconds`: from the request's arrival. `requests`: 0 in a record of what a request has used
    after its first record. `lost`: records before this one that could not be written.
    """

    time: float
    endpoint: str = ""
    key: str | None = None
    path: str = ""
    status: int = 200
    prompt: int = 0
    cached: int = 0
    output: int = 0
    seconds: float = 0.0
    requests: int = 1
    lost: int = 0


@dataclass(frozen=True)
class Lines:
    """The records of a journal's part. `damaged`: lines that are none."""

    records: list[UsageRecord]
    damaged: int


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(UsageRecord)


def line_of(record: UsageRecord) -> bytes:
    """Return the record as a line."""
    return _encoder.encode(record) + b"\n"


def whole_lines(data: bytes) -> bytes:
    """Return the part up to the last end of a line: what is behind it was cut off, or is being written."""
    return data[: data.rfind(b"\n") + 1]


def records_in(lines: bytes) -> Lines:
    """Read whole lines."""
    found: list[UsageRecord] = []
    damaged = 0
    for line in _split(lines):
        try:
            found.append(_decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            damaged += 1
    return Lines(found, damaged)


def _split(lines: bytes) -> Iterable[bytes]:
    return lines.split(b"\n")[:-1]


# The tokens that one HTTP request has used, counted as they come. Pure.
#
# A request may be many to the engines: several prompts, n choices of each, a turn for each call of a tool. A prompt
# counts once, however many choices it has, and from its first output on: what is given up before that has used nothing.
# Output counts as vLLM counts it in the `usage` of its answers, whether or not the client has waited for it.


class Counted(msgspec.Struct, frozen=True, array_like=True):
    """What was counted of a request in records of its use so far. `requests`: 1 once it was counted itself."""

    requests: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0


@dataclass(slots=True)
class Tally:
    """Tokens used so far. `cached` of the `prompt` tokens were in a worker's KV cache; of several choices of a prompt,
    as the first to come had it. `running`: requests that engines have, and that have not ended by themselves."""

    prompt: int = 0
    cached: int = 0
    output: int = 0
    running: int = 0
    _prompts: set[str] = field(default_factory=set)

    @property
    def total(self) -> int:
        """Tokens of prompts and outputs together."""
        return self.prompt + self.output

    def begin(self) -> None:
        """Note that engines have one more request of it."""
        self.running += 1

    def end(self) -> None:
        """Note that such a request has ended by itself."""
        self.running -= 1

    def add(self, prompt_id: str, prompt: int, cached: int, output: int) -> None:
        """Count an output of so many tokens. `prompt` and `cached` are of the prompt that it belongs to, which counts
        with its first output."""
        if prompt_id not in self._prompts:
            self._prompts.add(prompt_id)
            self.prompt += prompt
            self.cached += min(cached, prompt)
        self.output += output

    def replace(self, prompt: int, output: int) -> None:
        """Take over what the client was told, where engines compute more than an answer has."""
        self.prompt, self.output = prompt, output
        self.cached = min(self.cached, prompt)
