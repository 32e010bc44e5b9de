"""How the benchmark of rebalancing judges."""

from __future__ import annotations

import math
from dataclasses import replace

from benchmarks.routing.rebalancing import ITL_S, TTFT_S, Pooled, is_good
from dynamo_local.sim.requests import Arrival, Served

OFF = Pooled(ttft_p50_s=0.1, ttft_p99_s=1.0, itl_p99_s=0.02, goodput=10.0, preemptions=3, moves=0)


def test_each_measure_can_be_the_worst_one() -> None:
    assert OFF.worst_ratio_to(OFF) == 1.0
    assert math.isclose(replace(OFF, ttft_p99_s=1.2).worst_ratio_to(OFF), 1.2)
    assert math.isclose(replace(OFF, itl_p99_s=0.03, ttft_p99_s=0.1).worst_ratio_to(OFF), 1.5)
    assert math.isclose(replace(OFF, goodput=8.0, ttft_p99_s=0.1).worst_ratio_to(OFF), 1.25)
    assert replace(OFF, goodput=0.0).worst_ratio_to(OFF) == math.inf


def test_a_good_request_has_its_first_token_and_the_others_in_time() -> None:
    def served(first: float, gap: float) -> Served:
        return Served(Arrival(0, 5.0, 10, 11), 5.0, first_token_at=5 + first, ended_at=5 + first + 10 * gap, drawn=11)

    assert is_good(served(TTFT_S / 2, ITL_S / 2))
    assert not is_good(served(TTFT_S * 2, ITL_S / 2))
    assert not is_good(served(TTFT_S / 2, ITL_S * 2))
    assert is_good(Served(Arrival(0, 5.0, 10, 1), 5.0, first_token_at=5.5, ended_at=5.5, drawn=1))
