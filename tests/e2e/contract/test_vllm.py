"""This project is held to the pinned vLLM: an upgrade that breaks something breaks here."""

from __future__ import annotations

import asyncio
import inspect
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest

from dynamo_local.core import codec
from dynamo_local.core.errors import RequestError
from dynamo_local.core.messages.work import RequestEpoch, Submit, TokenBatch, TokenDelta
from dynamo_local.core.ports import Outputs, Request
from dynamo_local.engine.vllm.arguments import engine_schema, to_argv

pytest.importorskip("vllm", reason="vLLM is not installed")

import msgspec
import torch
from torch._dynamo import config as dynamo
from torch._dynamo.utils import counters
from vllm import SamplingParams
from vllm.distributed.device_communicators import shm_broadcast
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils import cpu_resource_utils
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.sample.ops.logprobs import batched_count_greater_than
from vllm.v1.worker.cpu_worker import CPUWorker

from dynamo_local.engine.vllm.patches.tuning import disable_compilation, skip_memory_binding, wait_without_spinning
from dynamo_local.engine.vllm.requests import wire
from dynamo_local.engine.vllm.requests.wire import pack_logprobs
from scripts.describe_vllm import TARGET, describe


def core_request(params: SamplingParams | None, **changes: object) -> EngineCoreRequest:
    fields: dict[str, object] = {
        "request_id": "r",
        "prompt_token_ids": [1, 2, 3],
        "mm_features": None,
        "sampling_params": params,
        "pooling_params": None,
        "arrival_time": 1.5,
        "lora_request": None,
        "cache_salt": "salt",
        "data_parallel_rank": None,
    }
    return EngineCoreRequest(**{**fields, **changes})  # type: ignore[arg-type]


def submitted(request: Request, position: int) -> EngineCoreRequest:
    """Through the bus and out again."""
    work = Submit(
        request_id=request.request_id,
        epoch=3,
        frontend="f",
        token_ids=list(request.prompt_token_ids),
        sampling=msgspec.Raw(request.sampling(position)),
        position=position,
        arrival_time=request.arrival_time,
        cache_salt=request.cache_salt,
    )
    return wire.core_request_of(codec.decode(codec.encode(work), Submit))


def test_the_described_arguments_are_those_of_the_installed_vllm() -> None:
    assert TARGET.read_bytes() == describe()


def test_sampling_parameters_survive_the_bus() -> None:
    params = SamplingParams(
        temperature=0.7, top_p=0.9, top_k=5, seed=11, stop=["x"], stop_token_ids=[7], max_tokens=20, min_tokens=4,
        logprobs=3, presence_penalty=0.5, logit_bias={3: 1.5}, bad_words=["no"],
        structured_outputs=StructuredOutputsParams(json={"type": "object"}),
    )  # fmt: skip
    there = submitted(wire.request_of(core_request(params)), 0)
    assert there.sampling_params == params
    assert there.request_id == "r#3"
    assert (there.prompt_token_ids, there.cache_salt, there.arrival_time) == ([1, 2, 3], "salt", 1.5)


def test_token_limits_shrink_with_what_was_accepted() -> None:
    params = SamplingParams(max_tokens=20, min_tokens=4)
    rest = msgspec.msgpack.decode(wire.request_of(core_request(params)).sampling(6))
    assert (rest["max_tokens"], rest.get("min_tokens", 0)) == (14, 0)
    assert (params.max_tokens, params.min_tokens) == (20, 4)


@pytest.mark.parametrize(
    "request_",
    [core_request(None), core_request(SamplingParams(), prompt_token_ids=None)],
)
def test_what_cannot_be_carried_is_refused(request_: EngineCoreRequest) -> None:
    with pytest.raises(RequestError):
        wire.request_of(request_)


def test_garbage_for_sampling_parameters_is_one_requests_failure() -> None:
    work = Submit(request_id="r", epoch=1, frontend="f", token_ids=[1], sampling=msgspec.Raw(b"\x81\xa1n\xa1x"))
    with pytest.raises(RequestError):
        wire.core_request_of(work)


def test_outputs_survive_the_bus_exactly() -> None:
    stats = PrefillStats()
    stats.set(10, 4, 0)
    output = EngineCoreOutput(
        request_id="r#1",
        new_token_ids=[5, 6],
        new_logprobs=LogprobsLists(
            np.array([[5, 1], [6, 2]], dtype=np.int32),
            np.array([[-0.1, -2.0], [-0.3, -1e-7]], dtype=np.float32),
            np.array([1, 1], dtype=np.int32),
        ),
        new_prompt_logprobs_tensors=LogprobsTensors(
            torch.tensor([[1, 2]]), torch.tensor([[-0.5, -0.25]]), torch.tensor([1])
        ),
        finish_reason=FinishReason.STOP,
        stop_reason="x",
        events=[EngineCoreEvent(EngineCoreEventType.SCHEDULED, 12.25)],
        prefill_stats=stats,
    )
    delta = wire.delta_of(output, RequestEpoch("r", 1), 7, 20.0)
    batch = TokenBatch(worker="w", seq=1, deltas=(delta,))
    back = wire.core_output_of(codec.decode(codec.encode(batch), TokenBatch).deltas[0], 20.0, 10)
    assert (back.request_id, back.new_token_ids, back.finish_reason, back.stop_reason) == (
        "r",
        [5, 6],
        0,
        "x",
    )
    assert back.new_logprobs is not None
    assert output.new_logprobs is not None
    for ours, theirs in zip(back.new_logprobs[:3], output.new_logprobs[:3], strict=True):
        assert np.array_equal(ours, theirs)
    assert back.new_prompt_logprobs_tensors is not None
    assert torch.equal(back.new_prompt_logprobs_tensors.logprobs, torch.tensor([[-0.5, -0.25]]))
    assert back.prefill_stats is not None
    assert back.prefill_stats.num_cached_tokens == 4
    assert back.events == output.events


def test_a_configuration_becomes_vllms_command_line() -> None:
    config = {"model": "m", "enforce-eager": True, "max-num-seqs": 4, "hf-overrides": {"a": -1}, "unknown": 1}
    argv = to_argv(config, engine_schema())
    assert argv == ["--model=m", "--enforce-eager", "--max-num-seqs=4", '--hf-overrides={"a":-1}']


class OneByOne:
    """A dispatcher whose worker is the test."""

    def __init__(self) -> None:
        self.submitted: asyncio.Queue[Request] = asyncio.Queue()
        self.cancelled: list[str] = []
        self.pending: asyncio.Queue[Outputs] = asyncio.Queue()

    async def submit(self, request: Request) -> None:
        self.submitted.put_nowait(request)

    async def cancel(self, request_ids: object) -> None:
        self.cancelled += list(request_ids)  # type: ignore[call-overload]

    async def outputs(self) -> Outputs:
        return await self.pending.get()

    def answer(self, *deltas: TokenDelta) -> None:
        self.pending.put_nowait(Outputs(time.monotonic(), deltas))


async def test_failures_reach_the_request_they_belong_to_and_no_other() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.exceptions import GracefulHTTPError

    from dynamo_local.engine.vllm.frontend.core_client import build
    from dynamo_local.model.named.random_model import random_model

    one = np.zeros((1, 1), dtype=np.float32)
    unwanted = pack_logprobs(one, one, one[0])
    dispatcher = OneByOne()
    config = AsyncEngineArgs(model=str(random_model()), max_model_len=256).create_engine_config()
    llm = await asyncio.to_thread(build, config, dispatcher, log_stats=True)

    async def generate(name: str, n: int = 1) -> list[int]:
        tokens: list[int] = []
        async for output in llm.generate({"prompt_token_ids": [1]}, SamplingParams(n=n, max_tokens=2), name):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    try:
        tasks = {name: asyncio.create_task(generate(name)) for name in ("good", "failed", "absurd")}
        both = asyncio.create_task(generate("pair", n=2))
        async with asyncio.timeout(60):
            requests = [await dispatcher.submitted.get() for _ in range(5)]
        ids = {name: next(r.request_id for r in requests if name in r.request_id) for name in (*tasks, "pair")}
        dispatcher.answer(
            TokenDelta(ids["failed"], 1, 0, [], finish="error", error="its worker was lost"),
            # Log-probabilities that nobody asked for: vLLM's output processor cannot but fail.
            TokenDelta(ids["absurd"], 1, 0, [65], logprobs=unwanted),
            TokenDelta(ids["pair"], 1, 0, [], finish="error", error="one of two"),
            TokenDelta(ids["good"], 1, 0, [65]),
        )
        dispatcher.answer(TokenDelta(ids["good"], 1, 1, [66], finish="length"))
        async with asyncio.timeout(60):
            await asyncio.wait({*tasks.values(), both})
        assert await tasks["good"] == [65, 66]
        with pytest.raises(GracefulHTTPError, match="its worker was lost"):
            await tasks["failed"]
        with pytest.raises(GracefulHTTPError, match="could not be processed"):
            await tasks["absurd"]
        with pytest.raises(GracefulHTTPError, match="one of two"):
            await both
        assert llm.output_processor.get_num_unfinished_requests() == 0
        assert not llm.errored
    finally:
        llm.shutdown()


def test_what_vllm_marks_to_be_compiled_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hasattr(batched_count_greater_than, "_torchdynamo_orig_callable")
    monkeypatch.setattr(dynamo, "disable", dynamo.disable)
    disable_compilation()
    counters.clear()
    ranks = batched_count_greater_than(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([[2.0]]))
    assert ranks.tolist() == [2]
    assert not counters["frames"]


@pytest.mark.parametrize(("nodes", "binds"), [([0], False), ([0, 1], True)])
def test_workers_bind_memory_where_there_is_a_choice(
    monkeypatch: pytest.MonkeyPatch, nodes: list[int], binds: bool
) -> None:
    bound: list[list[int]] = []
    monkeypatch.setattr(torch.ops._C, "init_cpu_memory_env", bound.append)
    monkeypatch.setattr(cpu_resource_utils, "get_memory_affinity", lambda: nodes)
    skip_memory_binding()
    assert "torch.ops._C.init_cpu_memory_env([memory_node])" in inspect.getsource(CPUWorker.__init__)
    torch.ops._C.init_cpu_memory_env([0])
    assert bound == ([[0]] if binds else [])


def test_processes_are_woken_up_by_what_comes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for patched in ("sched_yield", "SpinCondition"):
        monkeypatch.setattr(shm_broadcast, patched, getattr(shm_broadcast, patched))
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    wait_without_spinning()
    assert shm_broadcast.SpinCondition.__name__ == "FutexWait"
    writer = shm_broadcast.MessageQueue(n_reader=2, n_local_reader=2, max_chunk_bytes=1000)
    readers = [shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), rank) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        ready = [pool.submit(reader.wait_until_ready) for reader in readers]
        writer.wait_until_ready()
        wait(ready)
        # More than there are places for.
        messages = [list(range(n * 10)) for n in range(40)]
        read = [pool.submit(lambda of: [of.dequeue(30) for _ in messages], reader) for reader in readers]
        for message in messages:
            writer.enqueue(message, 30)
        assert [future.result() for future in read] == [messages] * 2
        stopped = [pool.submit(reader.dequeue, indefinite=True) for reader in readers]
        for reader, future in zip(readers, stopped, strict=True):
            reader.shutdown()
            with pytest.raises(RuntimeError, match="cancelled"):
                future.result(30)
