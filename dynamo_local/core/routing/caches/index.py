"""The prefix index: which worker has which leading blocks of a context cached. Pure.

Workers tell what changes in their caches, in numbered messages (core/messages/kv.py). A worker is *in step* if
none of its messages is missing. If one is, what is known of it may be wrong until it has repeated its whole state.

Beside what workers have told, the index knows the blocks that *come*: those of requests that were assigned to a worker
and are computed there. They count as cached, so that requests of one prefix that come at once go to one worker.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, repeat
from operator import or_

from dynamo_local.core.errors import DecodeError
from dynamo_local.core.messages.kv import KvChanges

# Keys of KV blocks: the first 8 bytes of the engine's hash of a block, as an unsigned number.
#
# An engine's hash covers the block's tokens and all before them, salt and adapter. So a key names a whole prefix, and
# two prefixes of a fleet share a key only by chance: once in 2**64 pairs. A sequence of keys travels packed: 8 bytes
# for each, little endian, which are the first bytes of the hashes themselves.

KEY_BYTES = 8


def key_of(block_hash: bytes) -> int:
    """Key of the block with this hash, of at least 8 bytes."""
    return int.from_bytes(block_hash[:KEY_BYTES], "little")


def pack(keys: Collection[int]) -> bytes:
    """Keys as bytes."""
    return struct.pack(f"<{len(keys)}Q", *keys)


def pack_hashes(hashes: Iterable[bytes]) -> bytes:
    """Keys of the blocks with these hashes, as bytes."""
    return b"".join(block_hash[:KEY_BYTES] for block_hash in hashes)


def number_of(packed: bytes) -> int:
    """Number of packed keys. Raises DecodeError if a part of one is missing."""
    count, rest = divmod(len(packed), KEY_BYTES)
    if rest:
        raise DecodeError(f"{len(packed)} bytes are no whole number of block keys")
    return count


def unpack(packed: bytes) -> tuple[int, ...]:
    """Inverse of `pack`. Raises DecodeError if a part of a key is missing."""
    return struct.unpack(f"<{number_of(packed)}Q", packed)


# The prefixes that come to workers: those of requests that were assigned and are computed there. Pure.
#
# A key of a block names all blocks before it, so a context is a path in a tree. Paths are compressed, as in a radix
# tree: a node is a run of blocks that the same requests have. So a context of thousands of blocks is entered, found and
# removed in a few steps, each a comparison of bytes.


@dataclass(slots=True)
class _Node:
    """`run`: packed keys of its blocks, in order. `requests`: how many have all of them, by the worker's bit; no
    request ends within a run. `bits`: the workers in `requests`. `next`: what follows, by its first key, packed."""

    run: bytes = b""
    requests: Counter[int] = field(default_factory=Counter)
    bits: int = 0
    next: dict[bytes, _Node] = field(default_factory=dict)

    def enter(self, bit: int) -> None:
        self.requests[bit] += 1
        self.bits |= bit

    def leave(self, bit: int, number: int = 1) -> None:
        self.requests[bit] -= number
        if not self.requests[bit]:
            del self.requests[bit]
            self.bits ^= bit

    def split(self, at: int) -> _Node:
        """Divide the run after `at` bytes. Returns a node for what is before; this one keeps the rest."""
        rest = self.run[at:]
        before = _Node(self.run[:at], Counter(self.requests), self.bits, {rest[:KEY_BYTES]: self})
        self.run = rest
        return before

    def join(self) -> None:
        """Take in what follows, if it is one run and the same requests have it."""
        if len(self.next) != 1:
            return
        (following,) = self.next.values()
        if following.requests == self.requests:
            self.run += following.run
            self.next = following.next


class ComingPrefixes:
    """Contexts of requests under way, by the bits of their workers. Contexts are packed keys."""

    def __init__(self) -> None:
        self._root = _Node()

    def add(self, bit: int, context: bytes) -> None:
        """Enter a request's context."""
        node, at = self._root, 0
        while at < len(context):
            first = context[at : at + KEY_BYTES]
            following = node.next.get(first)
            if following is None:
                following = node.next[first] = _Node(context[at:])
            shared = _shared(following.run, context, at)
            if shared < len(following.run):
                following = node.next[first] = following.split(shared)
            following.enter(bit)
            node, at = following, at + shared

    def remove(self, bit: int, context: bytes) -> None:
        """Take a context back that was entered for this worker. One that was not, or is gone, is ignored."""
        path, node, at = [self._root], self._root, 0
        while at < len(context):
            following = node.next.get(context[at : at + KEY_BYTES])
            if following is None or not following.bits & bit or not context.startswith(following.run, at):
                return
            node, at = following, at + len(following.run)
            path.append(node)
        for node in path[1:]:
            node.leave(bit)
        for before, node in zip(reversed(path[:-1]), reversed(path[1:]), strict=True):
            if not node.requests:
                del before.next[node.run[:KEY_BYTES]]
            else:
                node.join()

    def clear(self, bit: int) -> None:
        """Remove all contexts of a worker."""
        nodes = [self._root]
        while nodes:
            node = nodes.pop()
            for first, following in list(node.next.items()):
                if following.bits & bit:
                    following.leave(bit, following.requests[bit])
                if following.requests:
                    nodes.append(following)
                else:
                    del node.next[first]

    def along(self, context: bytes) -> Iterator[tuple[int, int]]:
        """The leading blocks of a context that come to any worker, in runs: number of blocks, and bits of workers."""
        node, at = self._root, 0
        while at < len(context):
            following = node.next.get(context[at : at + KEY_BYTES])
            if following is None:
                return
            shared = _shared(following.run, context, at)
            yield shared // KEY_BYTES, following.bits
            if shared < len(following.run):
                return
            node, at = following, at + shared


def _shared(run: bytes, context: bytes, at: int) -> int:
    """Bytes of whole keys that the run and the context from `at` have in common. The first key is the same."""
    if context.startswith(run, at):
        return len(run)
    same, most = 1, min(len(run), len(context) - at) // KEY_BYTES
    while same < most:
        middle = (same + most + 1) // 2
        start, end = same * KEY_BYTES, middle * KEY_BYTES
        if run[start:end] == context[at + start : at + end]:
            same = middle
        else:
            most = middle - 1
    return same * KEY_BYTES


# The index itself.

MOST_BLOCKS = 4_000_000
"""Bound on the blocks of an index: some 500 MB. Further ones are not entered, and count as not cached."""


@dataclass
class _Stream:
    """What has been heard of a worker. `number`: of its last message, None if it is not in step. `next_part`: the
    part of a repetition that is to come, and its number and parts. `blocks`: how many it holds."""

    number: int | None = None
    next_part: tuple[int, int, int] | None = None
    blocks: int = 0


class PrefixIndex:
    """The blocks of all workers of a model. Workers are named by their leases."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._bits = WorkerBits()
        self._held = HolderTable(most_blocks)
        self._coming = ComingPrefixes()
        self._streams: dict[str, _Stream] = {}

    # What workers tell

    def apply(self, changes: KvChanges) -> bool:
        """Enter a worker's message. Returns False if others are missing: a repetition is to be asked for.

        Raises DecodeError if the message has keys that are none.
        """
        removed, stored = unpack(changes.removed), unpack(changes.stored)
        stream = self._streams.setdefault(changes.worker, _Stream())
        if changes.parts > 0:
            return self._repeat(stream, changes, stored)
        if stream.number is not None and changes.number <= stream.number:
            return True
        follows = changes.number == (stream.number or 0) + 1 and (stream.number is not None or changes.number == 1)
        stream.number = changes.number if follows else None
        stream.next_part = None
        if changes.cleared:
            self._clear(changes.worker, stream)
        # Also after a gap: what is told is true, and it is soon repeated with the rest.
        self._replace(changes.worker, stream, removed, stored)
        return follows

    def in_step(self, worker: str) -> bool:
        """Whether all of the worker's messages have been heard."""
        stream = self._streams.get(worker)
        return stream is not None and stream.number is not None

    def doubt(self) -> None:
        """Take no worker for in step: messages may have been lost without a trace."""
        for stream in self._streams.values():
            stream.number = stream.next_part = None

    def forget(self, worker: str) -> None:
        """Drop all that is known of a worker that is gone."""
        stream = self._streams.pop(worker, None)
        bit = self._bits.known(worker)
        if stream is not None:
            self._clear(worker, stream)
        if bit:
            self._coming.clear(bit)
        self._bits.free(worker)

    def replace(self, worker: str, removed: Collection[int], stored: Collection[int]) -> None:
        """Change what a worker holds that tells nothing itself (`AssumedCaches`)."""
        self._replace(worker, self._streams.setdefault(worker, _Stream()), removed, stored)

    # What comes

    def expect(self, worker: str, context: bytes) -> None:
        """Enter the blocks of a context, packed, that come to a worker with a request."""
        self._coming.add(self._bits.bit(worker), context)

    def expect_no_more(self, worker: str, context: bytes) -> None:
        """Take back what `expect` has entered: the request has ended."""
        bit = self._bits.known(worker)
        if bit:
            self._coming.remove(bit, context)

    # What is known

    def cached(self, context: bytes) -> dict[str, int]:
        """The number of leading blocks of a context, packed, that each worker has, or will have. Workers that have none
        are left out. Raises DecodeError if `context` is no keys."""
        keys = unpack(context)
        workers, found = self._bits.workers, dict[str, int]()
        having, depth = -1, 0
        # In runs of blocks with the same holders: a prefix has few, and is long.
        coming = chain.from_iterable(repeat(bits, blocks) for blocks, bits in self._coming.along(context))
        holders = map(or_, map(self._held.get, keys, repeat(0)), chain(coming, repeat(0)))
        for here, run in groupby(holders):
            still = having & here
            if still != having and depth:
                found.update(dict.fromkeys(workers(having ^ still), depth))
            having = still
            if not having:
                return found
            depth += len(list(run))
        if keys:
            found.update(dict.fromkeys(workers(having), depth))
        return found

    def under_way(self, context: bytes) -> int:
        """Number of leading blocks of a context, packed, that requests under way have as well."""
        return sum(blocks for blocks, _ in self._coming.along(context))

    def __len__(self) -> int:
        """Number of different blocks that workers hold."""
        return len(self._held)

    def _repeat(self, stream: _Stream, changes: KvChanges, stored: Collection[int]) -> bool:
        if stream.number is not None and stream.number >= changes.number:
            return True
        if changes.part == 0:
            stream.number = None
            self._clear(changes.worker, stream)
        elif stream.next_part != (changes.number, changes.part, changes.parts):
            stream.next_part = None
            return False
        self._replace(changes.worker, stream, (), stored)
        if changes.part + 1 < changes.parts:
            stream.next_part = (changes.number, changes.part + 1, changes.parts)
        else:
            stream.number, stream.next_part = changes.number, None
        return True

    def _replace(self, worker: str, stream: _Stream, removed: Collection[int], stored: Collection[int]) -> None:
        bit = self._bits.bit(worker)
        stream.blocks -= self._held.remove(bit, removed)
        stream.blocks += self._held.add(bit, stored)

    def _clear(self, worker: str, stream: _Stream) -> None:
        if stream.blocks:
            self._held.clear(self._bits.bit(worker))
            stream.blocks = 0


# Which workers hold which blocks: a table from a block's key to a set of workers. Pure.
# A set of workers is an integer with a bit for each. Most blocks have one holder, and the integers of single workers
# are shared, so that a block costs an entry of a dict and its key: 130 bytes at most, however many workers there are.


class WorkerBits:
    """Numbers workers. A number that is free is given again."""

    def __init__(self) -> None:
        self._bits: dict[str, int] = {}
        self._workers: dict[int, str] = {}

    def bit(self, worker: str) -> int:
        """The integer with the worker's bit alone. Gives the worker one if it has none."""
        known = self._bits.get(worker)
        if known is not None:
            return known
        taken = sum(self._workers)
        free = ~taken & (taken + 1)
        self._bits[worker] = free
        self._workers[free] = worker
        return free

    def known(self, worker: str) -> int:
        """The integer with the worker's bit; 0 if it has none."""
        return self._bits.get(worker, 0)

    def free(self, worker: str) -> None:
        """Take the worker's bit away. No table may contain it any more."""
        bit = self._bits.pop(worker, None)
        if bit is not None:
            del self._workers[bit]

    def workers(self, bits: int) -> Iterator[str]:
        """The workers in a set."""
        while bits:
            lowest = bits & -bits
            yield self._workers[lowest]
            bits ^= lowest


class HolderTable:
    """The holders of each block. Blocks without a holder are not in it; it has `most` blocks at most."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._holders: dict[int, int] = {}
        self.get = self._holders.get

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, bit: int, keys: Collection[int]) -> int:
        """Add a holder to different blocks. Returns to how many it is new. Blocks beyond `most` are left out."""
        holders, new = self._holders, 0
        for before, some in self._runs(keys):
            if before & bit:
                continue
            room = len(some) if before else self._most - len(holders)
            holders.update(dict.fromkeys(some[:room], before | bit))
            new += min(len(some), room)
        return new

    def remove(self, bit: int, keys: Collection[int]) -> int:
        """Remove a holder from different blocks. Returns from how many it was removed; others are ignored."""
        holders, gone = self._holders, 0
        for before, some in self._runs(keys):
            if not before & bit:
                continue
            gone += len(some)
            if before != bit:
                holders.update(dict.fromkeys(some, before ^ bit))
            else:
                deque(map(holders.__delitem__, some), maxlen=0)
        return gone

    def _runs(self, keys: Collection[int]) -> Iterator[tuple[int, Sequence[int]]]:
        """Blocks in order, together with those that follow and have the same holders. Most prefixes have few such runs,
        however long they are, and what is done for a run at once is done by dict."""
        ordered, start = tuple(keys), 0
        for before, run in groupby(list(map(self.get, ordered, repeat(0)))):
            end = start + len(list(run))
            yield before, ordered[start:end]
            start = end

    def clear(self, bit: int) -> None:
        """Remove a holder from all blocks. Looks at each."""
        self.remove(bit, [key for key, holders in self._holders.items() if holders & bit])


# What is assumed of workers that do not tell which blocks they have: those of the requests assigned to them. Pure.
#
# A worker is taken for a cache of its size that drops what has been used least recently. That overestimates: requests
# use blocks for their output as well, and some fail. An overestimate costs a request that is computed where it might
# have been cached, and nothing more.


class AssumedCaches:
    """Enters into an index what workers without events are assumed to have cached."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._used: dict[str, OrderedDict[int, None]] = {}
        """The blocks of each worker, the least recently used first."""

    def use(self, worker: str, keys: Sequence[int], room: int) -> None:
        """Note that a request with these blocks has been assigned. `room`: number of blocks that the worker has."""
        used = self._used.setdefault(worker, OrderedDict())
        # The last blocks of a prefix first: they are dropped before those that they depend on.
        for key in reversed(keys):
            used[key] = None
            used.move_to_end(key)
        dropped = [used.popitem(last=False)[0] for _ in range(max(len(used) - max(room, 0), 0))]
        self._index.replace(worker, dropped, [key for key in keys if key in used])

    def forget(self, worker: str) -> None:
        """Drop all that is assumed of a worker. The index is told apart from this."""
        self._used.pop(worker, None)
