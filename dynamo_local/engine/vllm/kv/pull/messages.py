"""What the parts of a prefix pull tell each other: worker host, engine core, and (through a reader) another engine.

Hosts speak with their engine core by utility calls, whose results are plain msgpack; hosts of different engines speak
over the bus. Sizes are bounded here, where things come in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

MOST_BLOCKS = 16_384
"""Blocks of one pull: half a megabyte of hashes, or half a million tokens at the smallest block size there is."""

LONGEST_LEASE_S = 120.0
"""However long somebody asks for."""

HOST_PID = "host_pid"
"""In vLLM's configuration of the connector: the process that the engine's processes belong to."""

CPU_TUNING = "cpu_tuning"
"""In the same place: whether the engine is tuned for few cores (tuning.py)."""

_MOST_AGENT_BYTES = 1 << 16
_MOST_AGENTS_BYTES = 1 << 18
"""Of all ranks: they travel in one message, with the blocks."""
_MOST_RANKS = 64

Block = Annotated[int, msgspec.Meta(ge=0)]
Blocks = Annotated[tuple[Block, ...], msgspec.Meta(max_length=MOST_BLOCKS)]
Hashes = Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MOST_BLOCKS)]
Agents = Annotated[
    tuple[Annotated[bytes, msgspec.Meta(max_length=_MOST_AGENT_BYTES)], ...], msgspec.Meta(max_length=_MOST_RANKS)
]
"""By rank: what is to be known to read from that rank's worker process (a NixlHandshakePayload in msgpack).

vLLM would have the reader fetch it over an unauthenticated TCP port of the source. It travels with the answer to a pin
instead, over the bus, and no port is opened.
"""


def why_not_told(agents: Sequence[bytes]) -> str | None:
    """Why readers cannot be told of these agents, if so."""
    if len(agents) > _MOST_RANKS:
        return f"it has {len(agents)} ranks, and readers are told of {_MOST_RANKS} at most"
    largest, all_together = max(map(len, agents), default=0), sum(map(len, agents))
    if largest > _MOST_AGENT_BYTES or all_together > _MOST_AGENTS_BYTES:
        most = f"{_MOST_AGENT_BYTES} of a rank and {_MOST_AGENTS_BYTES} of all are the most"
        return (
            f"what NIXL has to tell readers of it is too long: {largest} bytes of a rank, {all_together} of all; {most}"
        )
    return None


class Handle(msgspec.Struct, frozen=True):
    """`PinAnswer.handle`: from which engine which blocks are to be read."""

    engine: Annotated[str, msgspec.Meta(max_length=64)]
    agents: Agents
    blocks: Blocks


class Pull(msgspec.Struct, frozen=True):
    """Blocks to be read before a request is computed. `hashes` are consecutive ones of its context."""

    handle: Handle
    hashes: Hashes
    until: float
    """What is not read before that time (CLOCK_MONOTONIC, s) does not count."""
    rest: int = 0
    """Tokens behind those of `hashes`, at the beginning of one more block."""


class TransferParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request's `kv_transfer_params`."""

    pull: Pull | None = None
    hold_s: float = 0.0


class Pinned(msgspec.Struct, frozen=True):
    """An engine core's answer to a pin."""

    blocks: tuple[int, ...]
    refused: str | None = None
    rest: int = 0
    """The last block is not full: it has the KV of so many tokens behind those of the hashes."""


class Warm(msgspec.Struct, frozen=True):
    """A request in the engine core that waits for more input: its name there, and of how many tokens it has the KV."""

    name: str
    tokens: int


class Description(msgspec.Struct, frozen=True):
    """What an engine core says of itself once it has started."""

    engine: str
    """New for every incarnation."""
    agents: Agents
    identity: dict[str, str]
    """All that gives a block's bytes their meaning, as far as the engine core knows."""
    block_size: int
    """Tokens of a block."""
    block_bytes: int
    """Of KV, on all ranks together."""
    unsupported: str | None = None
    """Why this engine neither pulls nor is pulled from."""


class PullCounts(msgspec.Struct, frozen=True):
    """Blocks and steps of an engine core, for its worker and for tests."""

    blocks: int
    used_blocks: int
    kept_blocks: int
    """Used by nothing but leases."""
    leases: int
    reads: int
    """Under way."""
    blocks_read: int
    """So far, and those whose read has failed as well."""
    scheduled_steps: int
    ended_steps: int
