"""Migrations in simulated fleets."""

from __future__ import annotations

from dynamo_local.core.migration.rebalancing import RebalancingLimits
from dynamo_local.core.routing.policies import POLICIES
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.sim.fleet import AT_ONCE, Messages, Result, names, simulate
from dynamo_local.sim.requests import Arrival
from dynamo_local.sim.routers import Placement, PolicyRouter
from dynamo_local.sim.worker import MockerTiming

SETTINGS = MockerSettings(mocker_kv_blocks=150, mocker_block_size=8, mocker_max_num_seqs=16)
ONLY_THRASHING = RebalancingLimits(below=0, above=1e9)


class _Sticky(PolicyRouter):
    """Sends everything to the first worker."""

    def place(self, arrival: Arrival, now: float) -> Placement:
        return Placement(names(1)[0])


def served(limits: RebalancingLimits | None, workers: int = 2, messages: Messages = AT_ONCE) -> Result:
    """Ten requests which together need twice the room of a worker, and take long."""
    arrivals = [Arrival(number, 0.1 * number, 80, 160 + number) for number in range(10)]
    router = _Sticky(POLICIES["least-loaded"](), names(workers), SETTINGS, pulls=False)
    return simulate(arrivals, router, workers, SETTINGS, MockerTiming(SETTINGS), limits, messages=messages)


def preemptions(result: Result) -> int:
    return sum(each.preempted for each in result.served)


def test_a_worker_that_thrashes_gives_some_away_and_all_get_their_tokens() -> None:
    without, moved = served(None), served(ONLY_THRASHING)
    assert without.moves == ()
    assert set(moved.moves) == {"thrash"}
    assert preemptions(moved) < preemptions(without)
    assert {each.worker for each in moved.served} == set(names(2))
    for result in (without, moved):
        assert [each.drawn for each in result.served] == [each.arrival.output_tokens for each in result.served]
        assert result.gaps.total == sum(each.arrival.output_tokens - 1 for each in result.served)
    assert all(worker.scheduler.pool.free == 150 for worker in moved.workers)


def test_a_migration_takes_the_time_of_its_messages() -> None:
    messages = Messages(0.1, 0.05)
    result = served(ONLY_THRASHING, messages=messages)
    moved = [each for each in result.served if each.moved]
    assert moved
    assert all(each.longest_gap_s > messages.round_trip_s for each in moved)
    assert [each.drawn for each in result.served] == [each.arrival.output_tokens for each in result.served]


def test_a_request_that_ends_before_the_messages_have_come_stays() -> None:
    assert served(ONLY_THRASHING, messages=Messages(1.0, 0.5)).moves == ()


def test_without_another_worker_nothing_moves() -> None:
    assert served(ONLY_THRASHING, workers=1).moves == ()
