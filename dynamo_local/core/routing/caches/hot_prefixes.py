"""Which prefixes are asked for most: decayed counts of the blocks of contexts, in a tree. Pure.

A worker counts the contexts that it is given. One that is new asks the others for theirs, adds them up, and fetches
the hottest before it is asked for them. A block stands under the one before it, so that it stands for a whole prefix,
and is never hotter than that one.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dynamo_local.core.messages.kv import HotBlock, HotPrefixesAnswer, Origin

MOST_BLOCKS = 8_192
"""Bound on the blocks that are counted. With 32 tokens each they take some 4 MB."""

MOST_DEPTH = 1_024
"""Number of leading blocks of a context that are counted."""

LEAST_HEAT = 1.25
"""Blocks that were asked for at least twice lately are worth bringing to another worker."""

PORTION_BLOCKS = 64
"""Number of blocks that are brought at once. Others that pull wait for them: about as long as for a step."""

_HALF_LIFE_S = 120.0
"""After this time a request counts half: conversations pause for a minute, and loads change within some."""

_DROPPED_AT_ONCE = 1 / 8
"""Share of the blocks that are dropped when there are too many: to find the coldest looks at all."""

_RESCALE_AT = 2.0**64


@dataclass(eq=False, slots=True)
class _Node:
    origin: Origin
    content: bytes
    parent: _Node | None
    depth: int
    heat: float = 0.0
    """Number of requests, each counted as 2 ** (its age at the epoch / half-life): what decays is the measure."""
    children: dict[bytes, _Node] = field(default_factory=dict)

    def __lt__(self, other: _Node) -> bool:
        """Which of two that are alike comes first, whichever was asked for first."""
        return (_path(self), repr(self.origin)) < (_path(other), repr(other.origin))


@dataclass(frozen=True)
class HotChain:
    """A prefix that was asked for: the contents of its blocks, and how often, a request counting less as it ages."""

    origin: Origin
    blocks: tuple[bytes, ...]
    heat: float


class HotPrefixes:
    """Counts how often blocks were asked for. Contents are bytes of any kind; times are CLOCK_MONOTONIC, in seconds.

    Holds `most_blocks` blocks at most: beyond that it drops the coldest, those that nothing stands under. Until then,
    the order of the requests does not matter.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS, half_life_s: float = _HALF_LIFE_S) -> None:
        self._most = most_blocks
        self._half_life_s = half_life_s
        self._roots: dict[Origin, _Node] = {}
        self._nodes: dict[_Node, None] = {}
        self._epoch: float | None = None

    def __len__(self) -> int:
        return len(self._nodes)

    def ask(self, origin: Origin, blocks: Iterable[bytes], now: float) -> None:
        """Count a request for a context with these blocks."""
        weight, node = self._weight(now), self._root(origin)
        for content, _ in zip(blocks, range(MOST_DEPTH), strict=False):
            node = self._below(node, content)
            node.heat += weight
        self._shrink()

    def add(self, told: HotPrefixesAnswer, now: float) -> None:
        """Add what another one has told (`tell`) just now."""
        weight, known = self._weight(now), list[_Node]()
        for block in told.blocks:
            parent = self._told_parent(told.origins, known, block.parent)
            if parent is None:
                return
            known.append(self._below(parent, block.tokens))
            known[-1].heat += block.heat * weight
        self._shrink()

    def depth(self, origin: Origin, blocks: Iterable[bytes]) -> int:
        """Number of leading blocks of a context that were asked for."""
        node = self._roots.get(origin)
        depth = 0
        for content in blocks:
            node = None if node is None else node.children.get(content)
            if node is None:
                break
            depth = node.depth
        return depth

    def tell(self, most_blocks: int, block_tokens: int, now: float) -> HotPrefixesAnswer:
        """The hottest blocks, each behind the one before it in its prefix."""
        weight = self._weight(now)
        chosen = self._hottest(most_blocks, 0.0)
        origins = {origin: -1 - place for place, origin in enumerate(dict.fromkeys(node.origin for node in chosen))}
        places = {node: place for place, node in enumerate(chosen)}
        blocks = [
            HotBlock(
                origins[node.origin] if node.depth == 1 else places[_parent(node)], node.content, node.heat / weight
            )
            for node in chosen
        ]
        return HotPrefixesAnswer(block_tokens, tuple(origins), tuple(blocks))

    def chains(self, most_blocks: int, now: float, least_heat: float = 0.0) -> list[HotChain]:
        """The hottest blocks as prefixes: one for each end, and for each place where they part. The hottest come
        first, and each behind those that it begins with."""
        weight = self._weight(now)
        chosen = self._hottest(most_blocks, least_heat * weight)
        following = Counter(node.parent for node in chosen)
        return [HotChain(node.origin, _path(node), node.heat / weight) for node in chosen if following[node] != 1]

    def _hottest(self, most_blocks: int, least: float) -> list[_Node]:
        hot = [node for node in self._nodes if node.heat >= least]
        return heapq.nsmallest(max(most_blocks, 0), hot, key=lambda node: (-node.heat, node.depth, node.content, node))

    def _root(self, origin: Origin) -> _Node:
        root = self._roots.get(origin)
        if root is None:
            root = self._roots[origin] = _Node(origin, b"", None, 0)
        return root

    def _below(self, parent: _Node, content: bytes) -> _Node:
        node = parent.children.get(content)
        if node is None:
            node = parent.children[content] = _Node(parent.origin, content, parent, parent.depth + 1)
            self._nodes[node] = None
        return node

    def _told_parent(self, origins: Sequence[Origin], known: Sequence[_Node], place: int) -> _Node | None:
        """None: there is no such block or origin, so that the rest cannot be understood."""
        if place >= 0:
            return known[place] if place < len(known) else None
        return self._root(origins[-1 - place]) if -1 - place < len(origins) else None

    def _weight(self, now: float) -> float:
        """What a request of now counts. Grows, so that nothing need be done as others age."""
        if self._epoch is None:
            self._epoch = now
        weight: float = 2.0 ** ((now - self._epoch) / self._half_life_s)
        if weight < _RESCALE_AT:
            return weight
        for node in self._nodes:
            node.heat /= weight
        self._epoch = now
        return 1.0

    def _shrink(self) -> None:
        if len(self._nodes) <= self._most:
            return
        surplus = len(self._nodes) - self._most + int(self._most * _DROPPED_AT_ONCE)
        # Those below first: none of them is hotter than what it stands under.
        for node in heapq.nsmallest(surplus, self._nodes, key=lambda node: (node.heat, -node.depth)):
            del self._nodes[node], _parent(node).children[node.content]
        self._roots = {origin: root for origin, root in self._roots.items() if root.children}


def hottest_of_all(
    told: Mapping[str, HotPrefixesAnswer], most_blocks: int, now: float
) -> Iterator[tuple[HotChain, str]]:
    """The prefixes that are hottest by what several workers have told, each with the one that was asked for most of it,
    which has it most likely. See `HotPrefixes.chains`."""
    together, alone = HotPrefixes(), {worker: HotPrefixes() for worker in told}
    for worker, answer in told.items():
        together.add(answer, now)
        alone[worker].add(answer, now)
    for chain in together.chains(most_blocks, now, LEAST_HEAT):
        yield chain, max(alone, key=lambda worker: (alone[worker].depth(chain.origin, chain.blocks), worker))


def _parent(block: _Node) -> _Node:
    assert block.parent is not None, "roots are no blocks"
    return block.parent


def _path(node: _Node) -> tuple[bytes, ...]:
    return tuple(reversed(list(_upwards(node))))


def _upwards(node: _Node) -> Iterator[bytes]:
    while node.parent is not None:
        yield node.content
        node = node.parent
