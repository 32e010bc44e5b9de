"""The scheduler of the pinned vLLM, by itself: who gives way to whom while its slots are taken."""

from __future__ import annotations

from collections import deque
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.config.lora import LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from dynamo_local.engine.vllm.patches.scheduler import have_requests_take_turns, have_urgent_requests_find_room
from tests.e2e.contract.lone_scheduler import BLOCK, PLACES, PROMPT, lone_scheduler, request_of

LONG = 40


class Engine:
    """A scheduler of two places. It plans a step while the `ahead` ones before are computed. The token of a position is
    its number: what is lost, repeated or out of order shows."""

    def __init__(self, ahead: int) -> None:
        have_requests_take_turns()
        have_urgent_requests_find_room()
        self.scheduler = lone_scheduler(AsyncScheduler if ahead else Scheduler)
        self._ahead = ahead
        self._numbers = count()
        self._computing: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.let_in: list[str] = []
        self.preempted: list[str] = []

    def submit(self, priority: int = 0, steps: int = LONG, blocked: bool = False) -> Request:
        request = request_of(next(self._numbers), steps=steps, priority=priority)
        if blocked:
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            request.structured_output_request = SimpleNamespace(grammar=None)  # type: ignore[assignment]
        self.scheduler.add_request(request)
        return request

    def load(self, priority: int, steps: int, reading: bool = False) -> Request:
        """A request whose first block has been read from elsewhere, or is being read, as a connector leaves it."""
        request = request_of(next(self._numbers), steps=steps, priority=priority)
        if reading:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        request.num_computed_tokens = BLOCK
        assert self.scheduler.kv_cache_manager.allocate_slots(request, BLOCK, delay_cache_blocks=True) is not None
        self.scheduler.add_request(request)
        assert request in self.scheduler.kv_holding_waiting
        return request

    def step(self) -> None:
        """Plan a step, and end the one that was planned so many steps before."""
        planned = self.scheduler.schedule()
        self.let_in += [new.req_id for new in planned.scheduled_new_reqs]
        self.let_in += planned.scheduled_cached_reqs.resumed_req_ids
        self.preempted += planned.preempted_req_ids or ()
        assert not (planned.preempted_req_ids or set()) & planned.num_scheduled_tokens.keys()
        ran = list(planned.num_scheduled_tokens)
        requests = self.scheduler.requests
        # The scheduler counts what it has planned as computed.
        sampled = [[requests[name].num_computed_tokens] for name in ran]
        self._computing.append((planned, ModelRunnerOutput(ran, {name: at for at, name in enumerate(ran)}, sampled)))
        if len(self._computing) > self._ahead:
            self.scheduler.update_from_output(*self._computing.popleft())

    def finish(self) -> None:
        while self.scheduler.has_unfinished_requests():
            self.step()


@pytest.fixture(params=[0, 1, 2], ids=["one step at a time", "a step ahead", "two steps ahead"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(request.param)


def answered(request: Request, steps: int = LONG) -> bool:
    return list(request.output_token_ids) == list(range(PROMPT, PROMPT + steps))


def test_an_urgent_request_takes_the_slot_of_a_less_urgent_one(engine: Engine) -> None:
    first, second = engine.submit(), engine.submit()
    for _ in range(6):
        engine.step()
    urgent = engine.submit(priority=-1, steps=3)
    engine.step()
    assert engine.preempted == [second.request_id]
    assert [each.request_id for each in engine.scheduler.running] == [first.request_id, urgent.request_id]
    engine.finish()
    # It gave way once, came back, and nobody's tokens differ from those of requests that run alone.
    assert engine.preempted == [second.request_id]
    assert answered(first)
    assert answered(second)
    assert answered(urgent, 3)


def test_nobody_gives_way_to_its_equal_or_to_who_cannot_begin(engine: Engine) -> None:
    running = [engine.submit(-1), engine.submit(5)]
    engine.step()
    compiling = engine.submit(-3, blocked=True)
    engine.submit(-2, steps=1, blocked=True)
    engine.submit(7, steps=1)
    for _ in range(LONG // 2):
        engine.step()
    assert engine.preempted == []
    compiling.structured_output_request = SimpleNamespace(grammar=object())  # type: ignore[assignment]
    engine.step()
    assert engine.preempted == [running[1].request_id]
    assert engine.let_in[-1] == compiling.request_id


def test_each_of_a_burst_takes_one_slot_and_background_work_goes_on(engine: Engine) -> None:
    background = [engine.submit(5) for _ in range(4)]
    for _ in range(3):
        engine.step()
    urgent = [engine.submit(-1, steps=4) for _ in range(60)]
    while not all(each.is_finished() for each in urgent):
        engine.step()
    # Both that ran gave way; what began by its class's turn while urgent ones waited stayed.
    assert len(engine.preempted) == PLACES
    names = [each.request_id for each in background]
    assert sum(name in names for name in engine.let_in[PLACES:]) >= 2
    engine.finish()
    assert all(answered(each) for each in background)
    assert all(answered(each, 4) for each in urgent)


def test_one_that_is_loaded_hides_no_more_urgent_one(engine: Engine) -> None:
    running = [engine.submit(), engine.submit()]
    for _ in range(3):
        engine.step()
    loaded = engine.load(priority=3, steps=2)
    for _ in range(3):
        engine.step()
    assert engine.preempted == []
    urgent = engine.submit(priority=-1, steps=3)
    engine.step()
    assert engine.preempted == [running[1].request_id]
    assert engine.let_in[-1] == urgent.request_id
    engine.finish()
    assert engine.preempted == [running[1].request_id]
    assert answered(loaded, 2)
    assert answered(urgent, 3)
    assert all(answered(each) for each in running)


def test_nobody_gives_way_to_one_whose_kv_is_still_being_read(engine: Engine) -> None:
    running = [engine.submit(), engine.submit()]
    engine.step()
    read = engine.load(priority=-1, steps=3, reading=True)
    for _ in range(3):
        engine.step()
    assert engine.preempted == []
    scheduler: Any = engine.scheduler
    # There is no connector to be told.
    scheduler._update_waiting_for_remote_kv = lambda done: scheduler.finished_recving_kv_req_ids.remove(done.request_id)
    scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving={read.request_id}))
    engine.step()
    assert engine.preempted == [running[1].request_id]
    engine.finish()
    assert answered(read, 3)
    assert all(answered(each) for each in running)


def test_nobody_gives_way_to_a_request_for_whose_adapter_there_is_no_room(engine: Engine) -> None:
    for number in (1, 1):
        engine.submit().lora_request = LoRARequest(f"adapter {number}", number, "nowhere")
    engine.scheduler.lora_config = LoRAConfig(max_loras=1)
    engine.step()
    engine.submit(priority=-1, steps=3).lora_request = LoRARequest("adapter 2", 2, "nowhere")
    for _ in range(5):
        engine.step()
    assert engine.preempted == []
    engine.submit(priority=-1, steps=3).lora_request = LoRARequest("adapter 1", 1, "nowhere")
    engine.step()
    assert len(engine.preempted) == 1
