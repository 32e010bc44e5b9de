"""Messages between workers about the prefixes that are asked for most (core/routing/caches/hot_prefixes.py)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from dynamo_local.core.codec import Message

MOST_TOLD_BLOCKS = 4_096
"""Bound on the blocks of an answer, which is one message."""

MOST_TOLD_TOKENS = 131_072
"""Bound on the tokens of an answer: 512 KiB."""


class HotPrefixesQuestion(Message, frozen=True, omit_defaults=True):
    """Asks a worker for the blocks that it was asked for most, `most_blocks` of them at most."""

    most_blocks: int


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """What besides its tokens distinguishes a prefix from others: see `Submit`."""

    cache_salt: str | None = None
    adapter: str | None = None


class HotBlock(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A block. `parent`: place among the answer's blocks of the one before it, which comes earlier; of the first block
    of a prefix, -1 less the place of its origin. `tokens`: its token ids, four bytes each, little endian. `heat`:
    number of requests for it, each counting less as it ages."""

    parent: int
    tokens: bytes
    heat: Annotated[float, msgspec.Meta(ge=0.0)]


class HotPrefixesAnswer(Message, frozen=True, omit_defaults=True):
    """The hottest blocks, of `block_tokens` tokens each."""

    block_tokens: int
    origins: tuple[Origin, ...] = ()
    blocks: Annotated[tuple[HotBlock, ...], msgspec.Meta(max_length=MOST_TOLD_BLOCKS)] = ()
