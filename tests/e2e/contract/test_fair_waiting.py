"""The scheduler of the pinned vLLM, by itself: which waiting request it lets in next."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import msgspec
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from dynamo_local.core.messages.work import Submit
from dynamo_local.engine.vllm.patches.requests.fair_waiting import have_requests_take_turns
from dynamo_local.engine.vllm.requests import wire
from dynamo_local.model.named.random_model import random_model

BLOCK, PLACES = 16, 2
PROMPT = 20


class Engine:
    """A scheduler of two places. Each request is over after one step, unless it is told how long it is."""

    def __init__(self, blocks: int = 100) -> None:
        have_requests_take_turns()
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
        self.scheduler = Scheduler(
            vllm_config=vllm_config,
            kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=SimpleNamespace(  # type: ignore[arg-type]
                should_advance=lambda _: False, accept_tokens=lambda *_: True
            ),
            block_size=BLOCK,
        )
        self._numbers = count()

    def submit(self, key: str = "", priority: int = 0, steps: int = 1) -> Request:
        number = next(self._numbers)
        sampling = msgspec.Raw(msgspec.msgpack.encode(SamplingParams(max_tokens=steps, ignore_eos=True)))
        work = Submit(
            f"r{number}", 1, "f", [1] * PROMPT, sampling, arrival_time=float(number), priority=priority, key=key
        )
        request = Request.from_engine_core_request(wire.core_request_of(work), None)
        self.scheduler.add_request(request)
        return request

    def step(self) -> list[str]:
        """Run a step. Return the requests that were let in."""
        planned: SchedulerOutput = self.scheduler.schedule()
        ran = list(planned.num_scheduled_tokens)
        done = ModelRunnerOutput(
            req_ids=ran,
            req_id_to_index={name: index for index, name in enumerate(ran)},
            sampled_token_ids=[[7]] * len(ran),
        )
        self.scheduler.update_from_output(planned, done)
        return [new.req_id for new in planned.scheduled_new_reqs]

    def order(self) -> list[str]:
        """Run to the end. Return the requests in the order in which they were let in."""
        found: list[str] = []
        while self.scheduler.has_unfinished_requests():
            found += self.step()
        return found


def test_a_scheduler_lets_classes_and_keys_take_turns() -> None:
    engine = Engine()
    background = engine.submit(priority=5)
    flood = [engine.submit("flood") for _ in range(60)]
    late = engine.submit("late")
    urgent = engine.submit("flood", priority=-1)
    order = engine.order()
    assert len(order) == 63
    assert order[:3] == [urgent.request_id, flood[0].request_id, late.request_id]
    assert order.index(background.request_id) < 20


def test_without_keys_and_classes_its_order_is_vllms_own() -> None:
    engine = Engine()
    submitted = [engine.submit(priority=priority) for priority in (-1, -3, -2, -2, -1)]
    expected = sorted(submitted, key=lambda request: (request.priority, request.arrival_time))
    assert engine.order() == [request.request_id for request in expected]


def test_who_is_aborted_or_cannot_begin_yet_delays_nobody() -> None:
    engine = Engine()
    blocked, second, third = engine.submit(), engine.submit(), engine.submit()
    blocked.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    blocked.structured_output_request = SimpleNamespace(grammar=None)  # type: ignore[assignment]
    engine.scheduler.finish_requests([second.request_id], RequestStatus.FINISHED_ABORTED)
    assert engine.step() == [third.request_id]
    waiting: Any = engine.scheduler.waiting
    assert list(waiting) == [blocked]


def test_a_preempted_request_comes_back_before_later_ones_of_its_key() -> None:
    # Room for the prompts of two, and for what one of them generates.
    engine = Engine(blocks=6)
    first, second = engine.submit("a", steps=30), engine.submit("a", steps=30)
    later = engine.submit("a")
    while not second.num_preemptions:
        engine.step()
    assert list(engine.scheduler.waiting) == [second, later]
    assert engine.scheduler.running == [first]
    engine.order()
    assert second.is_finished()
    assert later.is_finished()
