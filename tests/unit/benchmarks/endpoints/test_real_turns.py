"""What is made of a random load on real processes."""

from __future__ import annotations

from benchmarks.endpoints.real_turns import _judged
from benchmarks.endpoints.turn_bounds import fewest_swaps, least_swaps
from benchmarks.endpoints.turn_world import Arrival, World
from benchmarks.endpoints.turns import open_load
from dynamo_local.load.figures import Completion

NAMES = ["a", "b", "c"]


def answered(at: float, wait_s: float, runs_s: float, tokens: int = 5) -> Completion:
    record = Completion(at_s=at, output_tokens=5, sent_s=at, chunks_s=[at + wait_s], ended_s=at + wait_s + runs_s)
    record.tokens = tokens
    return record


def test_a_request_that_failed_or_was_cut_is_lost() -> None:
    planned = [Arrival(0.0, "a", 1.0), Arrival(1.0, "b", 1.0), Arrival(2.0, "c", 1.0)]
    failed = answered(1.0, 0.5, 1.0)
    failed.error = "refused"
    records = [answered(0.0, 0.5, 1.0), failed, answered(2.0, 3.0, 1.0, tokens=4)]
    found = _judged(planned, records, 3, 0.5, World(NAMES, 1, 0.5))
    assert (found.requests, found.answered, found.wait_most_s) == (3, 1, 0.5)
    assert found.errors == {"refused: ": 1, "too few tokens": 1}


def test_no_schedule_takes_fewer_swaps_than_the_bound() -> None:
    world = World(NAMES, 1, 0.5)
    arrivals = open_load(NAMES, 0.5, 120.0, 0.5, seed=3, skewed=False)
    fewest = fewest_swaps(world, arrivals, 60.0, 30.0)
    assert fewest is not None
    assert least_swaps(world, arrivals, 60.0) <= fewest <= len(arrivals)
    assert fewest_swaps(world, arrivals, 0.0, 30.0) is None
