"""The mocker's KV cache: a pool of blocks with a prefix cache, and what stands in each block."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from dynamo_local.core.errors import EngineError
from dynamo_local.engine.kv.cache_log import CacheLog

# A pool of KV blocks with a prefix cache.
#
# A block has references, of requests that use it and of leases, or is free. A block that was filled keeps its content's
# hash when it becomes free, and is found by it until it is taken for something else. Blocks without content are taken
# first, then those that have been free for longest.

BlockHash = bytes
"""Names a full block's content and all that precedes it. The same in every process."""

HASH_BYTES = 16


def root_hash(cache_salt: str | None, adapter: str | None) -> BlockHash:
    """Hash that the first block of a request is chained to. Requests with different salts or adapters share nothing."""
    root = b"" if cache_salt is None else blake2b(cache_salt.encode(), digest_size=HASH_BYTES).digest()
    if adapter is None:
        return root
    return blake2b(root + adapter.encode(), digest_size=HASH_BYTES, person=b"adapter").digest()


def chain_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Hash of the full block with these tokens (each in 0 to 2**63 - 1) that follows `parent`."""
    packed = struct.pack(f"<{len(token_ids)}q", *token_ids)
    return blake2b(parent + packed, digest_size=HASH_BYTES).digest()


def chain_hashes(token_ids: Sequence[int], root: BlockHash, block_size: int, count: int) -> list[BlockHash]:
    """Hashes of the first `count` blocks of a context, all of which are full."""
    found, parent = [], root
    for start in range(0, count * block_size, block_size):
        parent = chain_hash(parent, token_ids[start : start + block_size])
        found.append(parent)
    return found


class BlockPool:
    """Block ids are 0 to `total` - 1.

    Invariants: a block is free if and only if nothing refers to it; a hash leads to one block, which holds that content
    (or is given it by the step under way), referenced or not. Without `keep_freed`, free blocks have no hash, and are
    taken again as soon as possible.
    """

    def __init__(self, total: int, *, keep_freed: bool = True) -> None:
        self.total = total
        self._keep_freed = keep_freed
        self._references = [0] * total
        self._hashes: list[BlockHash | None] = [None] * total
        self._by_hash: dict[BlockHash, int] = {}
        self._blank = list(range(total - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        """Free blocks with content, the longest free first."""
        self.log = CacheLog()
        """What enters and leaves the prefix cache. (Without `keep_freed`, contents of referenced blocks.)"""
        self._report: Callable[[Iterable[int]], None] = lambda blocks: None

    def report_references(self, changed: Callable[[Iterable[int]], None]) -> None:
        """Call `changed` with blocks whose count of references has changed, except those newly taken."""
        self._report = changed

    @property
    def free(self) -> int:
        """Blocks that can be taken, those with cached content included."""
        return len(self._blank) + len(self._evictable)

    @property
    def cached(self) -> int:
        """Blocks with content that can be found."""
        return len(self._by_hash)

    def references_to(self, block: int) -> int:
        """Count the references to a block, of requests and leases together."""
        return self._references[block]

    def match(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Find the blocks of the longest cached prefix. Takes no reference."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def free_beside(self, blocks: Iterable[int]) -> int:
        """Count the blocks that would be free if these had a reference more."""
        return self.free - sum(self._references[block] == 0 for block in blocks)

    def refer(self, blocks: Sequence[int]) -> None:
        """Add one reference to each of these cached blocks, as found by `match`."""
        for block in blocks:
            if self._references[block] == 0:
                del self._evictable[block]
            self._references[block] += 1
        self._report(blocks)

    def allocate(self, count: int) -> list[int]:
        """Take blocks to be filled, with one reference each. `count` is at most `free`."""
        if count > self.free:
            raise ValueError(f"{count} blocks wanted, {self.free} free")
        blocks = [self._blank.pop() if self._blank else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def register(self, block: int, block_hash: BlockHash) -> None:
        """Note that a referenced block is filled. Another block that has this content already stays the cached one."""
        if self._hashes[block] is None and block_hash not in self._by_hash:
            self._by_hash[block_hash] = block
            self._hashes[block] = block_hash
            self.log.stored(block_hash)

    def give_up(self, blocks: Sequence[int]) -> None:
        """Take one reference from each block. The last, least shared, is evicted first."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"nobody refers to block {block}"
            self._references[block] -= 1
            self._reclaim(block)
        self._report(blocks)

    def empty(self) -> bool:
        """Forget the content of all blocks. False, and nothing is forgotten, if any of them is referred to."""
        if self.free < self.total:
            return False
        while self._evictable:
            self._blank.append(self._evict())
        self.log.cleared()
        return True

    def _reclaim(self, block: int) -> None:
        if self._references[block] > 0:
            return
        if self._hashes[block] is not None and self._keep_freed:
            self._evictable[block] = None
        else:
            self._forget_content(block)
            self._blank.append(block)

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        self._forget_content(block)
        return block

    def _forget_content(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hashes[block] = None
            self.log.removed(block_hash)


# Contents of the KV blocks, in memory that other processes can read without this one's help.
#
# The mocker has no keys and values. A block's content is instead 16 bytes that say what was computed into it, from
# which tokens and from which blocks before it; with KV of somebody else before it, another content comes out. That
# and the tokens drawn (`contents.py`) make KV that is where it does not belong visible, as garbage of a real model.
#
# The memory is shared as a file: a one-sided read is a read of that file, which asks the source nothing, and finds
# what the source has written last, whatever that is. The source keeps the file locked as long as it lives, and the
# kernel gives the lock up with the process: the memory of a dead engine cannot be read, as with a real network.

SLOT_BYTES = 16
_SUFFIX = ".kv"


class BlockMemory:
    """Memory of a pool: one content for each block. Private until it is shared."""

    def __init__(self, blocks: int) -> None:
        self._slots: bytearray | mmap.mmap = bytearray(blocks * SLOT_BYTES)
        self._path: Path | None = None
        self._descriptor: int | None = None

    @property
    def path(self) -> Path | None:
        """File in which other processes can read the memory; None: it is private."""
        return self._path

    def share(self, directory: Path) -> None:
        """Move the memory into a file of its own, mode 0600. Raises EngineError."""
        try:
            self._open(directory)
        except OSError as error:
            raise EngineError(f"cannot share KV blocks in {directory}: {error.strerror or error}") from error

    def close(self) -> None:
        """Make the memory private again. Readers that come later find no file."""
        if self._path is None or self._descriptor is None:
            return
        self._path.unlink(missing_ok=True)
        self._slots = bytearray(self._slots)
        os.close(self._descriptor)
        self._path = self._descriptor = None

    def write(self, block: int, content: bytes) -> None:
        self._slots[block * SLOT_BYTES : (block + 1) * SLOT_BYTES] = content

    def read(self, blocks: Iterable[int]) -> list[bytes]:
        slots = self._slots
        return [bytes(slots[block * SLOT_BYTES : (block + 1) * SLOT_BYTES]) for block in blocks]

    def clear(self) -> None:
        """Fill all blocks with zeros, which are the content of none."""
        self._slots[:] = bytes(len(self._slots))

    def _open(self, directory: Path) -> None:
        unfinished = directory / f"{secrets.token_hex(8)}.new"
        path = unfinished.with_suffix(_SUFFIX)
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, len(self._slots))
            slots = mmap.mmap(descriptor, len(self._slots))
            slots[:] = bytes(self._slots)
            # Locked before it has the name that others look for: a file with that name and no lock is a dead one's.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            unfinished.rename(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        self._slots, self._path, self._descriptor = slots, path, descriptor


def read_remote(path: Path, blocks: Sequence[int]) -> list[bytes]:
    """Read what another engine's blocks hold now. Raises EngineError if that engine is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise EngineError(f"the source's memory cannot be opened: {error.strerror}") from error
    try:
        contents = [os.pread(descriptor, SLOT_BYTES, block * SLOT_BYTES) for block in blocks]
        if any(len(content) != SLOT_BYTES for content in contents):
            raise EngineError("the source has no such blocks")
        if not _locked(descriptor):
            raise EngineError("the source is dead")
    except OSError as error:
        raise EngineError(f"the source's memory cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
    return contents


def _locked(descriptor: int) -> bool:
    """Whether the engine that made the file lives."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


# Contents of blocks, and how the tokens drawn from them depend on those.
#
# As with attention, both follow from everything that the blocks before hold: as long as each holds what belongs
# there, a block's content is its hash and tokens are those of `tokens.py`; otherwise neither is.


@dataclass(frozen=True)
class Filling:
    """First blocks of a request, of which a step fills those from index `start` on."""

    blocks: tuple[int, ...]
    hashes: tuple[BlockHash, ...]
    start: int


def fill(memory: BlockMemory, filling: Filling) -> None:
    """Write the contents that follow from the blocks before and the tokens (which the hash stands for)."""
    start, blocks, hashes = filling.start, filling.blocks, filling.hashes
    foreign = foreign_content(memory, blocks[:start], hashes[:start])
    for block, block_hash in zip(blocks[start:], hashes[start:], strict=True):
        content = block_hash
        if foreign is not None:
            content = blake2b(foreign + block_hash, digest_size=HASH_BYTES).digest()
        memory.write(block, content)


def foreign_content(
    memory: BlockMemory, blocks: tuple[int, ...] | list[int], hashes: tuple[BlockHash, ...] | list[BlockHash]
) -> bytes | None:
    """Compare blocks with the hashes that belong there. Returns None if all match, else a digest of the contents."""
    seen = memory.read(blocks)
    if seen == list(hashes):
        return None
    return blake2b(b"".join(seen), digest_size=HASH_BYTES).digest()
