"""Messages about KV blocks: what workers have cached, pins for those that read it, and the prefixes asked for most."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from dynamo_local.core.codec import Message


class CachedQuestion(Message, frozen=True, omit_defaults=True):
    """Question for the number of leading tokens of a prompt that the worker need not compute."""

    token_ids: list[int]
    cache_salt: str | None = None
    adapter: str | None = None


class CachedAnswer(Message, frozen=True):
    """The number of cached tokens, a multiple of the block size."""

    tokens: int


TLS_STREAM = "TLS"
"""In the place of a closed network (CIDR): KV is read between machines on a TLS stream."""

MOST_REST = 4096
"""Bound on the tokens behind the full blocks of a context; no engine has larger blocks."""


class PinQuestion(Message, frozen=True, omit_defaults=True):
    """Order to keep those leading blocks with these hashes that are cached, for `keep_s` seconds.

    `fingerprint` is the reader's. KV is read only between engines with the same one, which covers all that gives KV its
    meaning. `machine` is the reader's (state/machine/identity.py). On one machine both ends go by `PinAnswer.until`;
    between two, only in a `network` that both are in, and the reader asks after the read whether the pin was held
    (`ConfirmQuestion`).
    """

    pin: str
    """Name of the pin, new for each question."""
    fingerprint: str
    hashes: tuple[bytes, ...]
    keep_s: float
    rest: Annotated[tuple[int, ...], msgspec.Meta(max_length=MOST_REST)] = ()
    """Tokens behind these blocks. Their KV is pinned as well if a request that runs at the source has it."""
    machine: str = ""
    """Empty: not known, and the same as no other."""
    network: str = ""
    """Closed network (CIDR) in which the reader reads KV of other machines, or TLS_STREAM. Empty: it reads none."""


class PinAnswer(Message, frozen=True, omit_defaults=True):
    """Confirms that `blocks` leading blocks are written, and are not reused before `until` unless they are unpinned.
    `until` is a moment of the clock of `machine`, which both processes share (CLOCK_MONOTONIC, s). To a reader on
    another machine it is 0, and `pin` is the name by which it asks whether the pin was held: one that the source never
    gave before.

    With blocks == 0 nothing is pinned, and `refused` says why. `rest` > 0: one more block is pinned, with the KV of so
    many tokens; a running request goes on writing to it. `handle` tells the reader's engine where to read, in a format
    of the engine's own.
    """

    blocks: int
    until: float = 0.0
    handle: msgspec.Raw = msgspec.Raw(b"\xc0")
    refused: str | None = None
    rest: int = 0
    machine: str = ""
    pin: str = ""


class ConfirmQuestion(Message, frozen=True):
    """Question of a reader on another machine, sent after its last read has ended: is this pin still held? It is
    released by the answer."""

    pin: str


class ConfirmAnswer(Message, frozen=True):
    """Whether the pin was held until the question came, so that none of its blocks was reused before."""

    held: bool


class Unpin(Message, frozen=True, tag="unpin"):
    """Ends pins: the blocks have been read, or are not needed. Unknown pins are ignored."""

    pins: tuple[str, ...]


Between = Literal["closed network", "TLS", "recomputed"]


class KvWays(msgspec.Struct, frozen=True):
    """For a worker, the numbers of other workers of its model whose KV it reads from their memory, as on one machine
    (`local`), reads in the network that the admin has declared closed or on a TLS stream (`network`), and computes
    anew: they are on another machine and do not both read so, only one of two on a machine does, or an engine transfers
    none.

    `between_machines`: what becomes of KV that crosses machines, as far as this worker decides it. `elsewhere`:
    number of other workers of its model that are on other machines, or whose machine or this worker's is not known.
    """

    local: int
    computed_anew: int
    network: int = 0
    between_machines: Between = "recomputed"
    elsewhere: int = 0


# What has become of a worker's cached blocks, for whoever routes to it. Blocks are named by their keys
# (core/routing/caches/index.py), packed.


MOST_KEYS = 50_000
"""Bound on the keys of a message, those removed and those stored together."""


class KvChanges(Message, frozen=True, omit_defaults=True):
    """What has become of a worker's cached blocks since its message before, or (`parts` > 0) a part of all of them.

    Changes: first `cleared`, then `removed`, then `stored`; a key is in one of the two at most. `number` is 1 for a
    worker's first changes, and grows by one. What has more than MOST_KEYS keys is sent as several messages.

    A repetition (`parts` > 0) tells the whole state as it is after the changes with this `number` (0: before any): the
    keys in `stored` of its parts 0 to `parts` - 1, which follow each other with no changes between them.
    """

    worker: str
    number: int
    removed: bytes = b""
    stored: bytes = b""
    cleared: bool = False
    part: int = 0
    parts: int = 0


class KvStateQuestion(Message, frozen=True, omit_defaults=True):
    """Asks a worker to publish a repetition. There is no other answer; one repetition may serve several questions."""


# Between workers: the prefixes that are asked for most (core/routing/caches/hot_prefixes.py).


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
