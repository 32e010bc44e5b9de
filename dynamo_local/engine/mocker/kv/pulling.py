"""Agreement of the two ends of a pull, and the destination's use of an offer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from dynamo_local.core.ports import PulledPrefix
from dynamo_local.engine.mocker.kv.blocks import BlockHash
from dynamo_local.engine.mocker.settings import MockerSettings


class Handle(msgspec.Struct, frozen=True, array_like=True):
    """`PinAnswer.handle` of this engine: a file, and which of its slots, in the order of the hashes asked for."""

    path: str
    blocks: tuple[int, ...]


_decoder = msgspec.msgpack.Decoder(Handle)


@dataclass(frozen=True)
class Pull:
    """Another engine's blocks for the blocks from index `start` on of a context, readable until `until`."""

    path: str
    blocks: tuple[int, ...]
    start: int
    until: float
    confirm: str = ""
    """Pin that has to be confirmed after the read for this to count. Empty: `until` decides."""

    @property
    def end(self) -> int:
        return self.start + len(self.blocks)

    def helps(self, cached: int, now: float) -> bool:
        """Whether to read, if the first `cached` blocks are here: nothing may be missing between, and something
        must be new."""
        return self.start <= cached < self.end and now < self.until


def fingerprint(settings: MockerSettings, model: str) -> str:
    """Engines that have the same can read each other's blocks."""
    return f"mocker 1; {model}; {settings.mocker_block_size} tokens a block; {settings.mocker_vocab_size} token ids"


def plan_pull(pulled: PulledPrefix, hashes: Sequence[BlockHash]) -> Pull | None:
    """Find which part of an offer serves a context whose blocks have these hashes. None: no part."""
    offered = pulled.hashes[: max(pulled.answer.blocks, 0)]
    try:
        handle = _decoder.decode(pulled.answer.handle)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not offered or len(handle.blocks) < len(offered) or offered[0] not in hashes or min(handle.blocks) < 0:
        return None
    start = hashes.index(offered[0])
    wanted = hashes[start : start + len(offered)]
    if tuple(wanted) != offered[: len(wanted)]:
        return None
    return Pull(
        handle.path, handle.blocks[: len(wanted)], start, pulled.answer.until, pulled.pin if pulled.to_confirm else ""
    )
