"""The scheduler of the pinned vLLM without an engine, and requests for it."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from dynamo_local.core.messages.work import Submit
from dynamo_local.engine.vllm.requests import wire
from dynamo_local.model.named.random_model import random_model

BLOCK, PLACES = 16, 2
PROMPT = 20
"""Tokens of each prompt."""


def lone_scheduler(kind: type[Scheduler] = Scheduler, blocks: int = 100) -> Scheduler:
    """Return a scheduler with `PLACES` slots and so many KV blocks, by priority and without a prefix cache."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    vllm_config = AsyncEngineArgs(
        model=str(random_model()),
        max_model_len=256,
        max_num_seqs=PLACES,
        block_size=BLOCK,
        enable_prefix_caching=False,
        scheduling_policy="priority",
        async_scheduling=False,
    ).create_engine_config()
    vllm_config.cache_config.num_gpu_blocks = blocks
    return kind(
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=SimpleNamespace(  # type: ignore[arg-type]
            should_advance=lambda _: False, accept_tokens=lambda *_: True
        ),
        block_size=BLOCK,
    )


def request_of(number: int, *, steps: int, priority: int = 0, key: str = "") -> Request:
    """Return a request for so many tokens, as a worker gives it to its engine. A higher number comes later."""
    sampling = msgspec.Raw(msgspec.msgpack.encode(SamplingParams(max_tokens=steps, ignore_eos=True)))
    work = Submit(f"r{number}", 1, "f", [1] * PROMPT, sampling, arrival_time=float(number), priority=priority, key=key)
    return Request.from_engine_core_request(wire.core_request_of(work), None)
