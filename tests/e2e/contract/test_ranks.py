"""Tensor parallelism on CPU slots, and a frontend beside it, are held to the pinned vLLM."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.config import ParallelConfig
from vllm.platforms import current_platform
from vllm.utils.ompmultiprocessing import OMPProcessManager

from dynamo_local.engine.vllm.frontend.application import parse
from dynamo_local.engine.vllm.patches.tuning import start_ranks_on_their_slots

CORES = sorted(os.sched_getaffinity(0))


def test_a_frontend_that_is_told_of_ranks_looks_for_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)
    monkeypatch.setattr(type(current_platform), "device_count", lambda _: 0, raising=False)
    with pytest.raises(ValueError, match="larger than the number of available GPUs"):
        ParallelConfig(tensor_parallel_size=2)
    args = parse({"model": "m", "tensor-parallel-size": 2, "pipeline-parallel-size": 2, "max-model-len": 64})
    parallel = ParallelConfig(
        tensor_parallel_size=args.tensor_parallel_size, pipeline_parallel_size=args.pipeline_parallel_size
    )
    assert (parallel.world_size, args.max_model_len) == (1, 64)


@pytest.mark.skipif(len(CORES) < 2, reason="two slots have the same core")
def test_a_rank_begins_on_the_cores_of_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OMPProcessManager, "configure_omp_envs", OMPProcessManager.configure_omp_envs)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{CORES[0]}|{CORES[1]}")
    start_ranks_on_their_slots()
    ranks = SimpleNamespace(local_world_size=2, data_parallel_rank_local=None, _api_process_count=1)
    config: Any = SimpleNamespace(parallel_config=ranks, kv_transfer_config=None)
    manager = OMPProcessManager(config)
    for rank in range(2):
        with manager.configure_omp_envs(rank=rank, local_rank=rank):
            assert os.sched_getaffinity(0) == {CORES[rank]}
        assert os.sched_getaffinity(0) == set(CORES)
