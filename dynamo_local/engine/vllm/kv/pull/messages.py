"""Messages of a prefix pull, between worker host, engine core and (through a reader) another engine.

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
"""Longest time for which blocks are leased, whatever is asked for."""

FORGOTTEN_S = 300.0
"""Time after which a reader forgets an engine that it has read nothing from."""

TRANSFER = "kv_transfer_params"
"""vLLM's name of the extra argument of a request that has its `TransferParams`."""

HOST_PID = "host_pid"
"""Key in vLLM's configuration of the connector: the process that the engine's processes belong to."""

CPU_TUNING = "cpu_tuning"
"""Key in the same place: whether the engine is tuned for few cores (patches/tuning.py)."""

NET_DEVICE = "net_device"
"""Key in the same place: network interface on which engines of other machines read KV. Empty: there is none."""

STREAM_HOST = "stream_host"
"""Key in the same place: address of this machine at which engines of others read KV on a stream. Empty: none do."""

_MOST_AGENT_BYTES = 1 << 16
_MOST_AGENTS_BYTES = 1 << 18
"""Bytes of all ranks together: they travel in one message, with the blocks."""
_MOST_RANKS = 64

Block = Annotated[int, msgspec.Meta(ge=0)]
Blocks = Annotated[tuple[Block, ...], msgspec.Meta(max_length=MOST_BLOCKS)]
Hashes = Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MOST_BLOCKS)]
Agents = Annotated[
    tuple[Annotated[bytes, msgspec.Meta(max_length=_MOST_AGENT_BYTES)], ...], msgspec.Meta(max_length=_MOST_RANKS)
]
"""Agents of a source, by rank: what a reader needs for that worker process (a NixlHandshakePayload in msgpack).

vLLM would have the reader fetch it over an unauthenticated TCP port of the source. It travels with the answer to a pin
instead, over the bus, and no port is opened.
"""


def why_not_told(agents: Sequence[bytes]) -> str | None:
    """Say why these agents are too large to send to readers; None if they are not."""
    if len(agents) > _MOST_RANKS:
        return f"it has {len(agents)} ranks, and a reader takes {_MOST_RANKS} at most"
    largest, all_together = max(map(len, agents), default=0), sum(map(len, agents))
    if largest > _MOST_AGENT_BYTES or all_together > _MOST_AGENTS_BYTES:
        most = f"{_MOST_AGENT_BYTES} of a rank and {_MOST_AGENTS_BYTES} of all are the most"
        return f"its NIXL metadata is too large for a message: {largest} bytes of a rank, {all_together} of all; {most}"
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
    """Time (CLOCK_MONOTONIC, s) before which the read has to be complete to count."""
    rest: int = 0
    """Tokens behind those of `hashes`, at the beginning of one more block."""
    confirm: str = ""
    """Pin that has to be confirmed after the read for this to count (confirmations.py). Empty: `until` decides."""


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
    """A request in the engine core that waits for more input: its name there, of how many tokens it has the KV, and the
    number of its adapter (0: none)."""

    name: str
    tokens: int
    adapter: int = 0


class Description(msgspec.Struct, frozen=True):
    """Description that an engine core gives of itself once it has started."""

    engine: str
    """Id of the engine, new with every start."""
    agents: Agents
    identity: dict[str, str]
    """Identity of the KV (identity.py), as far as the engine core knows it."""
    block_size: int
    """Tokens in a block."""
    block_bytes: int
    """Bytes of KV in a block, on all ranks together."""
    unsupported: str | None = None
    """Reason why this engine neither pulls nor is pulled from, if it does not."""


class PullCounts(msgspec.Struct, frozen=True):
    """Blocks and steps of an engine core, for its worker and for tests."""

    blocks: int
    used_blocks: int
    kept_blocks: int
    """Blocks that are used by nothing but leases."""
    leases: int
    reads: int
    """Reads under way."""
    blocks_read: int
    """Blocks of all reads so far, failed ones included."""
    scheduled_steps: int
    ended_steps: int
