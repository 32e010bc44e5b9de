"""Messages about KV blocks: what is cached, and pins between workers."""

from __future__ import annotations

from typing import Annotated

import msgspec

from dynamo_local.core.codec import VERSION


class CachedQuestion(msgspec.Struct, frozen=True, omit_defaults=True):
    """How many leading tokens of this prompt need no computing at the worker asked?"""

    token_ids: list[int]
    cache_salt: str | None = None
    adapter: str | None = None
    v: int = VERSION


class CachedAnswer(msgspec.Struct, frozen=True):
    """So many tokens, a multiple of the block size."""

    tokens: int
    v: int = VERSION


MOST_REST = 4096
"""Bound on the tokens behind the full blocks of a context: fewer than any block has."""


class PinQuestion(msgspec.Struct, frozen=True, omit_defaults=True):
    """Keep the blocks with these hashes, as many leading ones as there are, until `until` (CLOCK_MONOTONIC, s).

    `fingerprint` is the reader's: KV is read only between engines that agree on everything that gives it its meaning.
    """

    pin: str
    """Names the pin; unique to the reader's attempt."""
    fingerprint: str
    hashes: tuple[bytes, ...]
    until: float
    rest: Annotated[tuple[int, ...], msgspec.Meta(max_length=MOST_REST)] = ()
    """Tokens behind these blocks, whose KV is wanted as well if a request that runs there has it."""
    v: int = VERSION


class PinAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """`blocks` leading blocks are written, and will not be reused before `until` unless the reader unpins them.

    With blocks == 0 nothing is pinned, and `refused` says why. `rest`: of so many tokens behind them, one more block is
    pinned, which somebody goes on writing to. `handle` is the engine's own word to its like: where and what to read.
    """

    blocks: int
    until: float = 0.0
    handle: msgspec.Raw = msgspec.Raw(b"\xc0")
    refused: str | None = None
    rest: int = 0
    v: int = VERSION


class Unpin(msgspec.Struct, frozen=True, tag="unpin"):
    """The reader has read, or given up. Unknown pins are ignored."""

    pins: tuple[str, ...]
    v: int = VERSION
