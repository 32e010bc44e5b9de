"""What one HTTP request has used, as a line of a journal. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
