from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_local.core.beats import BEAT_S
from dynamo_local.core.messages.presence import Load
from dynamo_local.core.migration.rebalancing import RebalancingLimits
from dynamo_local.core.ports import CacheChanges
from dynamo_local.core.routing.policies import POLICIES
from dynamo_local.sim import worker as worker_module
from dynamo_local.sim.fleet import Messages, Result, names, simulate
from dynamo_local.sim.requests import Arrival
from dynamo_local.sim.routers import Placement, PolicyRouter
from dynamo_local.sim.worker import DynamoTiming, MockerTiming
from tests.unit.sim.workloads import SMALL, workloads

TIMING = MockerTiming(SMALL)


def served_by(policy: str, arrivals: Sequence[Arrival]) -> Result:
    router = PolicyRouter(POLICIES[policy](), names(3), SMALL, pulls=True)
    return simulate(arrivals, router, 3, SMALL, TIMING)


@given(
    workloads(),
    st.sampled_from(["kv", "least-loaded", "random"]),
    st.booleans(),
    st.sampled_from([None, RebalancingLimits()]),
    st.builds(Messages, st.floats(0, 0.2), st.floats(0, 0.2)),
)
@settings(max_examples=60, deadline=None)
def test_each_request_ends_once_and_leaves_nothing(
    arrivals: list[Arrival], policy: str, pulls: bool, limits: RebalancingLimits | None, messages: Messages
) -> None:
    router = PolicyRouter(POLICIES[policy](), names(3), SMALL, pulls=pulls)
    result = simulate(arrivals, router, 3, SMALL, TIMING, limits, messages=messages)
    expected = [each.number for each in arrivals] + [each.then.number for each in arrivals if each.then]
    assert sorted(each.arrival.number for each in result.served) == sorted(expected)
    for each in result.served:
        end = min(each.arrival.prompt_tokens + each.arrival.output_tokens, SMALL.context_limit)
        assert each.drawn == end - each.arrival.prompt_tokens
        assert each.at < each.first_token_at <= each.ended_at < math.inf
        assert 0 <= each.cached + each.pulled < each.arrival.prompt_tokens
    assert result.gaps.total == sum(each.drawn - 1 for each in result.served)
    for worker in result.workers:
        assert not worker.scheduler.has_work
        assert len(worker.scheduler.leases) == 0
        assert worker.scheduler.pool.free == worker.scheduler.pool.total


@given(workloads())
@settings(max_examples=20, deadline=None)
def test_equal_workloads_give_equal_results(arrivals: list[Arrival]) -> None:
    first, second = served_by("kv", arrivals), served_by("kv", list(reversed(arrivals)))
    assert [vars_of(each) for each in first.served] == [vars_of(each) for each in second.served]
    assert first.gaps == second.gaps


@given(workloads())
@settings(max_examples=40, deadline=None)
def test_steps_done_at_once_are_those_done_one_by_one(arrivals: list[Arrival]) -> None:
    _assert_alike(served_by("kv", arrivals), _one_by_one(lambda: served_by("kv", arrivals)))


@pytest.mark.parametrize("after_ms", range(1, 60, 3))
def test_what_is_pulled_from_a_worker_waits_for_the_step_that_it_is_in(after_ms: int) -> None:
    keys = tuple(range(1, 10))
    requests = [Arrival(0, 0.0, 40, 2, keys), Arrival(1, 1.0, 2, 40), Arrival(2, 1.0 + after_ms / 1e3, 40, 2, keys)]

    def pulling() -> Result:
        return simulate(requests, _First(last=2), 2, SMALL, TIMING)

    _assert_alike(pulling(), _one_by_one(pulling))


def _one_by_one(simulated: Callable[[], Result]) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_module, "alike", lambda *_: 0)
        return simulated()


def _assert_alike(at_once: Result, one_by_one: Result) -> None:
    for some, other in zip(at_once.served, one_by_one.served, strict=True):
        assert (some.worker, some.cached, some.drawn) == (other.worker, other.cached, other.drawn)
        assert some.first_token_at == pytest.approx(other.first_token_at)
        assert some.ended_at == pytest.approx(other.ended_at)


def vars_of(served: object) -> list[object]:
    return [getattr(served, name) for name in served.__slots__]  # type: ignore[attr-defined]


class _First:
    """Sends everything to the first worker, but the last request to the second, which pulls."""

    needs_loads = True

    def __init__(self, last: int) -> None:
        self._last = last
        self.reports = 0
        self.stored: dict[str, bytes] = {}

    def place(self, arrival: Arrival, now: float) -> Placement:
        first, second = names(2)
        return Placement(second, pull_from=first) if arrival.number == self._last else Placement(first)

    def first_token(self, arrival: Arrival) -> None:
        pass

    def moved(self, arrival: Arrival, worker: str, tokens: int, now: float) -> None:
        pass

    def ended(self, arrival: Arrival) -> None:
        pass

    def reported(self, loads: Mapping[str, Load]) -> None:
        assert loads.keys() == set(names(2))
        self.reports += 1

    def cache_changed(self, worker: str, changes: CacheChanges) -> None:
        self.stored[worker] = self.stored.get(worker, b"") + changes.stored


def test_a_prefix_is_found_at_its_worker_and_pulled_by_another_one() -> None:
    keys = tuple(range(1, 10))
    requests = [Arrival(number, number * 10.0, 40, 2, keys) for number in range(3)]
    router = _First(last=2)
    cold, warm, pulled = simulate(requests, router, 2, SMALL, TIMING).served
    assert (cold.cached, cold.pulled) == (0, 0)
    assert (warm.cached, warm.pulled) == (36, 0)
    assert (pulled.cached, pulled.pulled) == (0, 36)
    assert warm.ttft_s < pulled.ttft_s < cold.ttft_s
    assert set(router.stored) == set(names(2))
    assert router.reports >= 20.0 / BEAT_S


def test_a_request_that_fits_no_worker_is_refused() -> None:
    with pytest.raises(ValueError, match="fits no worker"):
        served_by("kv", [Arrival(0, 0.0, 80, 1)])


def test_a_single_request_takes_the_modelled_time() -> None:
    wide = replace(SMALL, mocker_kv_blocks=2_048, mocker_block_size=512, mocker_max_num_batched_tokens=8_192)
    wide = replace(wide, mocker_max_model_len=1_000_000)
    router = PolicyRouter(POLICIES["round-robin"](), names(1), wide, pulls=False)
    arrivals = [Arrival(0, 0.0, 20_000, 60), Arrival(1, 100.0, 8_193, 60)]
    long, other = simulate(arrivals, router, 1, wide, DynamoTiming(1_048_576)).served
    assert long.ttft_s * 1e3 == pytest.approx(415.1833, abs=1e-3)
    assert (long.ended_at - long.at) * 1e3 == pytest.approx(814.1598, abs=1e-2)
    assert other.ttft_s * 1e3 == pytest.approx(185.6535, abs=1e-3)
