"""Reads published request traces: the Azure LLM inference traces and those of Mooncake."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

import msgspec

from dynamo_local.core.errors import UsageError
from dynamo_local.load.workload.workload import Planned

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
