"""The scheduler of the pinned vLLM, by itself: which waiting request it lets in next."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from dynamo_local.engine.vllm.patches.scheduler import have_requests_take_turns
from tests.e2e.contract.lone_scheduler import lone_scheduler, request_of


class Engine:
    """A scheduler of two places. Each request is over after one step, unless it is told how long it is."""

    def __init__(self, blocks: int = 100) -> None:
        have_requests_take_turns()
        self.scheduler = lone_scheduler(blocks=blocks)
        self._numbers = count()

    def submit(self, key: str = "", priority: int = 0, steps: int = 1) -> Request:
        request = request_of(next(self._numbers), steps=steps, priority=priority, key=key)
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
