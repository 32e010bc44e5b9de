"""Answers go through the states of OpenAI's API, and through no others."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.answers.events import ENDS, NEXT, AnswerState, OutOfOrderError, ended

STATES = sorted(set(NEXT) - {""})


def changes(*states: str) -> list[dict[str, Any]]:
    return [{"type": f"response.{state}", "response": {"status": state, "output": []}} for state in states]


@given(st.lists(st.sampled_from(STATES), max_size=6))
def test_nothing_follows_an_end_and_nothing_is_skipped(states: list[str]) -> None:
    state = AnswerState()
    for event in changes(*states):
        before, count = state.status, state.events
        try:
            state.take(event)
        except OutOfOrderError:
            assert event["response"]["status"] not in NEXT[before]
            assert (state.status, state.events) == (before, count)
        else:
            assert before not in ENDS
            assert state.events == count + 1
    assert state.has_ended == (state.status in ENDS)


def test_items_that_are_done_are_seen_before_the_end() -> None:
    state = AnswerState()
    for event in [*changes("queued", "in_progress"), {"type": "response.output_item.done", "item": {"id": "a"}}]:
        state.take(event)
    assert state.response["output"] == [{"id": "a"}]
    failed = state.failed("the disk is full")
    assert failed["sequence_number"] == 3
    assert failed["response"]["output"] == [{"id": "a"}]
    state.take(failed)
    assert state.has_ended
    with pytest.raises(OutOfOrderError):
        state.take({"type": "response.output_text.delta"})


def test_nothing_is_output_before_it_is_in_progress() -> None:
    state = AnswerState()
    with pytest.raises(OutOfOrderError):
        state.take({"type": "response.output_text.delta", "delta": "a"})


def test_the_last_event_has_the_name_of_its_status() -> None:
    last = {"type": "response.completed", "response": {"status": "incomplete"}}
    assert ended(last)["type"] == "response.incomplete"
    assert ended({"type": "response.output_text.done"}) == {"type": "response.output_text.done"}
