"""Hashes of the blocks of requests' contexts, by which a router finds who has them cached."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.config import CacheConfig
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreRequest

from dynamo_local.core.ports import ContextHashes
from dynamo_local.engine.vllm.kv.block_hashes import BlockHasher


class Hashing:
    """Makes the hashes of requests of one model. `contents`: by vLLM's number, the names that engines give to adapters
    of a list (requests/listed_adapters.py)."""

    def __init__(self, cache_config: CacheConfig) -> None:
        self.contents: dict[int, str] = {}
        self._cache_config = cache_config
        self._hashers: dict[int, BlockHasher] = {}

    def of(self, request: EngineCoreRequest) -> ContextHashes | None:
        """Return what makes the hashes of a request's context. None: nothing cached may be used for it, or the names of
        its adapter in the engines are not known."""
        params = request.sampling_params
        if params is None or params.skip_reading_prefix_cache or not self._cache_config.enable_prefix_caching:
            return None
        adapter = request.lora_request
        if adapter is not None and adapter.lora_int_id in self.contents:
            adapter = LoRARequest(self.contents[adapter.lora_int_id], adapter.lora_int_id, adapter.lora_path)
        salt = request.cache_salt

        def hashes(token_ids: Sequence[int], block_size: int) -> list[bytes]:
            return self._hasher(block_size)(token_ids, salt, adapter)

        return hashes

    def _hasher(self, block_size: int) -> BlockHasher:
        known = self._hashers.get(block_size)
        if known is None:
            known = self._hashers[block_size] = BlockHasher(self._cache_config, block_size)
        return known
