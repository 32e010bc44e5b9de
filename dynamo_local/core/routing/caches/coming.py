"""The prefixes that come to workers: those of requests that were assigned and are computed there. Pure.

A key of a block names all blocks before it, so a context is a path in a tree. Paths are compressed, as in a radix tree:
a node is a run of blocks that the same requests have. So a context of thousands of blocks is entered, found and removed
in a few steps, each a comparison of bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from dynamo_local.core.routing.caches.block_keys import KEY_BYTES


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
    """Contexts of requests under way, by the bits of their workers. Contexts are packed keys (block_keys.py)."""

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
