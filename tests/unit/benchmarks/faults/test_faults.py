"""The fault table: gaps, judged answers, rows."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.faults.clients import Asked, longest_gap_s
from benchmarks.faults.kinds import FAULTS
from benchmarks.faults.parts import all_ready, running
from benchmarks.faults.table import show, together
from benchmarks.harness.client import Completion

TRIAL: dict[str, Any] = {
    "under_way": 16,
    "lost": 0,
    "refused": 0,
    "wrong": 0,
    "gap_s": 1.5,
    "ready_s": 6.0,
    "note": "",
    "errors": [],
}


class TestTheLongestGap:
    def test_begins_with_the_last_token_before_the_fault(self) -> None:
        assert longest_gap_s([1.0, 9.5, 12.0, 12.5], begin=10.0, end=13.0) == 2.5

    def test_lasts_until_the_end_if_no_token_comes_any_more(self) -> None:
        assert longest_gap_s([1.0, 9.0], begin=10.0, end=30.0) == 21.0

    def test_of_a_client_without_a_token_is_everything(self) -> None:
        assert longest_gap_s([], begin=10.0, end=30.0) == 20.0

    @given(st.lists(st.floats(0, 100), max_size=20).map(sorted))
    def test_is_no_shorter_than_any_silence_after_the_fault(self, times: list[float]) -> None:
        gap = longest_gap_s(times, begin=50.0, end=101.0)
        for earlier, later in itertools.pairwise([*times, 101.0]):
            assert later < 50.0 or gap >= later - earlier


def answer(tokens: list[int], *, ended: bool, failure: str = "") -> Completion:
    return Completion(token_ids=tokens, ended_s=5.0 if ended else None, failure=failure)


@pytest.mark.parametrize(
    ("got", "wrong"),
    [
        (answer([1, 2, 3], ended=True), False),
        (answer([1, 2], ended=True), True),
        (answer([1, 2], ended=False), False),
        (answer([1, 2], ended=True, failure="lost"), False),
        (answer([1, 3], ended=False), True),
        (answer([1, 2, 3, 3], ended=True), True),
    ],
)
def test_answers_are_judged_as_far_as_they_came(got: Completion, wrong: bool) -> None:
    assert Asked("", got).wrong([1, 2, 3]) is wrong


def test_what_ps_says() -> None:
    ready = {"role": "aggregated", "state": "ready", "load": {"running": 3}}
    starting = {"role": "aggregated", "state": "starting", "load": None}
    assert all_ready([ready])
    assert not all_ready([ready, starting])
    assert not all_ready(None)
    assert not all_ready([])
    assert running([ready, starting, {"role": "router", "state": "ready", "load": None}]) == [3]


def test_the_table_tells_of_servers_that_ended(capsys: pytest.CaptureFixture[str]) -> None:
    ended = {**TRIAL, "lost": 16, "ready_s": None, "note": "the server ended", "errors": ["connection reset"]}
    show("ours", together([{"kill-circusd": [ended]}, {"kill-circusd": [TRIAL], "kill-host": [TRIAL]}]))
    told = capsys.readouterr().out
    assert "16 of 32" in told
    assert "the server ended (1 of 2)" in told
    assert "kill-circusd: connection reset" in told
    assert told.index(FAULTS["kill-host"].title) < told.index(FAULTS["kill-circusd"].title)
