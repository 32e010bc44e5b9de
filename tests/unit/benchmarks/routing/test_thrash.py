"""`benchmarks routing --steps thrash` begins with the spiral that it is to see the end of."""

from __future__ import annotations

import math

from benchmarks.routing.thrash import SHARE, measured, sessions
from dynamo_local.sim.requests import Arrival


def test_turns_go_on_where_the_last_one_ended() -> None:
    for first in sessions(1):
        turn: Arrival | None = first
        context = 0
        while turn is not None:
            assert turn.prompt_tokens > context
            context = turn.prompt_tokens + turn.output_tokens
            turn = turn.then
        assert len(first.keys) * 16 >= context


def test_hits_are_lost_before_and_come_back() -> None:
    for runs in measured(quick=True).values():
        for run in runs:
            assert run["before"] < SHARE * run["best"]
            assert math.isfinite(run["after_s"])
