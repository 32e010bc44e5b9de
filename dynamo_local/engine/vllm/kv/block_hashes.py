"""Hashes of KV blocks, computed outside of the engine core exactly as it does."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.config import CacheConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request


class BlockHasher:
    """Hasher of one engine. Called with a context's tokens, salt and adapter, gives the hashes of its full blocks."""

    def __init__(self, cache_config: CacheConfig, block_size: int | None = None) -> None:
        """`block_size`: of the engine's blocks, in tokens, if the configuration does not say it."""
        function = get_hash_fn_by_name(cache_config.prefix_caching_hash_algo)
        init_none_hash(function)
        self._hasher = get_request_block_hasher(block_size or cache_config.block_size, function)

    def __call__(
        self, token_ids: Sequence[int], cache_salt: str | None, adapter: LoRARequest | None = None
    ) -> list[bytes]:
        # vLLM hashes requests; what goes into a hash beside the tokens (the salt of the first block, the adapter's
        # name and path) is its to know.
        request = Request(
            request_id="",
            prompt_token_ids=list(token_ids),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            cache_salt=cache_salt,
            lora_request=adapter,
            block_hasher=self._hasher,
        )
        return list(request.block_hashes)
