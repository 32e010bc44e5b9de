"""Readers of public request traces."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dynamo_local.core.errors import UsageError
from dynamo_local.sim.requests import Arrival

BLOCK_TOKENS = 512
"""Tokens of a block of Mooncake's traces."""


class _Row(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def mooncake(path: Path, speed: float = 1.0, most: int | None = None) -> list[Arrival]:
    """The requests of a trace in Mooncake's format, arriving `speed` times as fast; the first `most` of them.

    A hash id names a block of 512 tokens with all before it. The last one of a request names a part of a block, which
    is no full block of anybody. Raises UsageError.
    """
    try:
        rows = msgspec.json.Decoder(_Row).decode_lines(path.read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{path} is no trace in Mooncake's format: {error}", "name a file of JSON lines") from error
    return [
        Arrival(
            number,
            row.timestamp / 1e3 / speed,
            row.input_length,
            max(row.output_length, 1),
            tuple(row.hash_ids[: row.input_length // BLOCK_TOKENS]),
        )
        for number, row in enumerate(rows[:most])
    ]
