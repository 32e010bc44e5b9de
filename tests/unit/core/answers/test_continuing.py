"""What is made again continues what is known: the whole is the same, wherever it was cut off."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.answers.events import Continuation, DifferentAnswerError

Events = list[dict[str, Any]]

TEXTS = st.lists(st.text("ab ", min_size=1, max_size=6), min_size=1, max_size=6)


def cuts(text: str, at: list[int]) -> list[str]:
    places = sorted({place % (len(text) + 1) for place in at} | {0, len(text)})
    return [text[begin:end] for begin, end in pairwise(places)]


def events(items: list[str], at: list[int], prefix: str) -> Events:
    """Each item has an id of its own, and a text in as many deltas as it is cut into."""
    made: Events = []
    for number, text in enumerate(items):
        name = f"{prefix}{number}"
        made.append({"type": "item.added", "item": {"id": name, "n": number}})
        made += [
            {"type": "text.delta", "item_id": name, "delta": part, "logprobs": list(part)} for part in cuts(text, at)
        ]
        made.append({"type": "text.done", "item_id": name, "text": text})
    made.append({"type": "end", "response": {"output": [{"id": f"{prefix}{n}"} for n in range(len(items))]}})
    return made


def merged(events: Events) -> Events:
    """The events with the deltas of one text joined."""
    found: Events = []
    for event in events:
        last = found[-1] if found else {}
        if event["type"] == last.get("type") == "text.delta" and event["item_id"] == last["item_id"]:
            joined = {name: last[name] + event[name] for name in ("delta", "logprobs")}
            found[-1] = {**last, **joined}
        else:
            found.append(event)
    return found


@given(TEXTS, st.lists(st.integers(0, 40)), st.lists(st.integers(0, 40)), st.integers(0, 40))
def test_what_is_known_and_what_is_new_are_the_whole(
    items: list[str], before: list[int], after: list[int], known: int
) -> None:
    whole = events(items, before, "old")
    journal = whole[: known % (len(whole) + 1)]
    continuation = Continuation(journal)
    new: Events = []
    for event in events(items, after, "new"):
        new += continuation.take(event)
    names = {f"new{n}": f"old{n}" for n in range(len(items)) if any(f"old{n}" in str(event) for event in journal)}
    told = merged(journal + new)
    expected = merged(whole)
    assert [event["type"] for event in told] == [event["type"] for event in expected]
    for one, other in zip(told, expected, strict=True):
        for new_name in (f"new{n}" for n in range(len(items))):
            if new_name in names:
                assert new_name not in str(one)
        assert one.get("delta") == other.get("delta")
        assert one.get("logprobs") == other.get("logprobs")


@given(TEXTS, st.lists(st.integers(0, 40)), st.data())
def test_another_text_than_clients_have_seen_is_refused(items: list[str], at: list[int], data: st.DataObject) -> None:
    journal = events(items, at, "old")
    number = data.draw(st.integers(0, len(items) - 1))
    other = [*items]
    other[number] += "!"
    continuation = Continuation(journal)
    with pytest.raises(DifferentAnswerError):  # noqa: PT012 -- whichever event shows it
        for event in events(other, at, "new"):
            continuation.take(event)


def test_ids_cannot_change_places() -> None:
    continuation = Continuation([{"type": "a", "id": "x"}, {"type": "b", "id": "y"}])
    assert continuation.take({"type": "a", "id": "p"}) == []
    with pytest.raises(DifferentAnswerError):
        continuation.take({"type": "b", "id": "p"})
