"""Which blocks a request's context has, as a router asks it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.messages.presence import EngineInfo
from dynamo_local.core.ports import Request
from dynamo_local.core.routing.caches.block_keys import pack_hashes
from dynamo_local.engine.mocker.kv.blocks import chain_hashes, root_hash

_IN_A_THREAD = 4_096
"""Contexts of more tokens are hashed in a thread: 2 ms of the event loop at most."""

_MOCKER = "mocker"
"""Its name in presences. All other engines are vLLM's."""

NO_BLOCKS = (b"", 0)


async def blocks_of(request: Request, token_ids: Sequence[int], fleet: FleetWatch) -> tuple[bytes, int]:
    """Return the keys of the full blocks of a context, packed, and the tokens of a block; NO_BLOCKS if the workers do
    not all name blocks alike, or have started none."""
    engine = _engine_of_all(fleet)
    if engine is None or request.hashes is None or len(token_ids) <= engine.block_size:
        return NO_BLOCKS
    if len(token_ids) > _IN_A_THREAD:
        hashes = await asyncio.to_thread(_hashes, request, token_ids, engine)
    else:
        hashes = _hashes(request, token_ids, engine)
    return pack_hashes(hashes), engine.block_size


def _engine_of_all(fleet: FleetWatch) -> EngineInfo | None:
    """What the routable workers have in common, if they name blocks alike."""
    engines = [worker.engine for worker in fleet.view.routable()]
    kinds = {None if engine is None else (engine.engine, engine.block_size) for engine in engines}
    return engines[0] if len(kinds) == 1 else None


def _hashes(request: Request, token_ids: Sequence[int], engine: EngineInfo) -> list[bytes]:
    if engine.engine == _MOCKER:
        root = root_hash(request.cache_salt, request.adapter)
        return chain_hashes(token_ids, root, engine.block_size, len(token_ids) // engine.block_size)
    assert request.hashes is not None
    return request.hashes(token_ids, engine.block_size)
