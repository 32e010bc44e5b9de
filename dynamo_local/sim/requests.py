"""Requests of a simulation, and their state in a simulated scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from dynamo_local.core.priority.fair_queue import Claim
from dynamo_local.core.routing.caches.index import KEY_BYTES, pack_hashes
from dynamo_local.engine.mocker.blocks import BlockHash
from dynamo_local.engine.mocker.sequence import Sequence
from dynamo_local.engine.mocker.tokens import Sampling

_LENGTH_ALONE = Sampling(max_tokens=None, ignore_eos=True)
_OWN = 1 << 63
"""Keys of blocks that nobody else has are above this; those of traces and workloads are below."""


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes, in seconds, and its lengths in tokens. `keys` name the first full blocks of its
    context, prompt and output; the blocks behind them are nobody else's. `then`: the next one of its session, whose
    `at` counts from the end of this one."""

    number: int
    at: float
    prompt_tokens: int
    output_tokens: int
    keys: tuple[int, ...] = ()
    priority: int = 0
    key: str = ""
    then: Arrival | None = None

    def hashes(self, count: int) -> list[BlockHash]:
        """Hashes of the first `count` blocks of its context."""
        return [_hash(self._key(index)) for index in range(count)]

    def packed(self, block_tokens: int) -> bytes:
        """Keys of the prompt's blocks that can be cached, packed. The last token is in none."""
        return pack_hashes(self.hashes((self.prompt_tokens - 1) // block_tokens))

    def _key(self, index: int) -> int:
        return self.keys[index] if index < len(self.keys) else _OWN | self.number << 20 | index


def _hash(key: int) -> BlockHash:
    return key.to_bytes(KEY_BYTES, "little")


@dataclass(eq=False, slots=True)
class Counted(Sequence):
    """A request of which only lengths and the blocks' hashes are known. It is finished by its length alone."""

    counted: int = 0
    known: list[BlockHash] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.counted

    def hashes(self, count: int, block_size: int) -> list[BlockHash]:
        return self.known[:count]

    def draw(self, vocab_size: int, foreign: bytes | None = None) -> None:
        self.draw_all(1)

    def draw_all(self, count: int) -> None:
        """Draw that many tokens."""
        self.counted += count
        if self.counted >= self.end:
            self.finish = "length"


def counted(arrival: Arrival, now: float, block_size: int, context_limit: int) -> Counted:
    """State of a request that has just been submitted."""
    end = min(arrival.prompt_tokens + arrival.output_tokens, context_limit)
    return Counted(
        tokens=[],
        prompt_tokens=arrival.prompt_tokens,
        sampling=_LENGTH_ALONE,
        claim=Claim(arrival.priority, now, arrival.number, arrival.key),
        end=end,
        root=b"",
        state=0,
        counted=arrival.prompt_tokens,
        known=arrival.hashes(end // block_size),
    )
