from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_local.core.routing.policies import POLICIES
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.sim.fleet import Joining, Result, names, simulate
from dynamo_local.sim.requests import Arrival
from dynamo_local.sim.routers import PolicyRouter
from dynamo_local.sim.worker import MockerTiming

BLOCK, POOL, JOINS_AT_S = 4, 200, 10.0
SETTINGS = MockerSettings(mocker_kv_blocks=POOL, mocker_block_size=BLOCK, mocker_max_num_batched_tokens=64)
SHARED = tuple(range(1, 1 + 80))


def simulated(arrivals: Sequence[Arrival], share: float) -> Result:
    router = PolicyRouter(POLICIES["kv"](), names(2)[:1], SETTINGS, pulls=False)
    joining = Joining(JOINS_AT_S, share, router.join)
    return simulate(arrivals, router, 2, SETTINGS, MockerTiming(SETTINGS), joining=joining)


def cached_by(result: Result, keys: Sequence[int]) -> int:
    pool = result.workers[-1].scheduler.pool
    return len(pool.match(Arrival(0, 0.0, 1, 1, tuple(keys)).hashes(len(keys))))


def test_the_worker_that_joins_has_what_was_asked_for_twice_and_without_a_share_nothing() -> None:
    asked = [Arrival(number, float(number), len(SHARED) * BLOCK + 3, 5, SHARED) for number in range(3)]
    asked.append(Arrival(3, 5.0, 43, 5, tuple(range(1_000, 1_010))))
    assert cached_by(simulated(asked, 0.5), SHARED) == len(SHARED)
    assert cached_by(simulated(asked, 0.0), SHARED) == 0


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 120), st.floats(0.0, 20.0)), max_size=30))
@settings(max_examples=30, deadline=None)
def test_it_fills_no_more_than_its_share_and_all_requests_are_served(requests: list[tuple[int, int, float]]) -> None:
    asked = [
        Arrival(number, at, blocks * BLOCK + 1, 2, tuple(kind << 20 | index for index in range(1, blocks + 1)))
        for number, (kind, blocks, at) in enumerate(requests)
    ]
    result = simulated(asked, 0.5)
    assert len(result.served) == len(asked)
    new = result.workers[-1]
    assert not new.scheduler.has_work
    if all(each.worker != new.name for each in result.served):
        assert new.scheduler.pool.cached <= POOL // 2
