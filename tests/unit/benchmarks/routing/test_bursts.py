"""`benchmarks routing --steps bursts`: a prefix is not followed into a queue."""

from __future__ import annotations

from benchmarks.routing.bursts import BURSTS, PREFIX, WORSE, arrivals, measured


def test_a_burst_begins_alike_and_comes_behind_all_that_is_before() -> None:
    for burst in BURSTS:
        before, at_once = arrivals(burst, 1)
        assert len({each.keys for each in at_once}) == burst.prefixes
        assert {each.keys for each in at_once} < {each.keys for each in before} | {()}
        assert max(each.at for each in before) < min(each.at for each in at_once)
        assert {each.prompt_tokens for each in at_once} == {PREFIX + burst.own}


def test_the_first_tokens_of_a_burst_come_as_soon_as_where_nobody_looks_for_the_prefix() -> None:
    for arms in measured(quick=True).values():
        for figure in ("p50_s", "p99_s"):
            assert arms["kv"][figure] <= WORSE * min(arms[base][figure] for base in ("least-loaded", "round-robin"))
