"""Conversations are recognised by their beginning, and know when no worker has their cache any more."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.http.conversations import Conversations, conversation_of

TEXTS = st.text(max_size=600)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
ASKED = {"role": "user", "content": "How deep is the river?"}
SYSTEM = {"role": "system", "content": "Be brief. " * 100}


def chat(*messages: dict[str, Any]) -> int | None:
    return conversation_of({"messages": list(messages)})


def test_a_conversation_is_the_same_in_each_of_its_turns() -> None:
    answered = {"role": "assistant", "content": "Four feet."}
    again = {"role": "user", "content": "And the lake?"}
    assert chat(SYSTEM, ASKED) == chat(SYSTEM, ASKED, answered, again) is not None
    assert chat(SYSTEM, ASKED) != chat(SYSTEM, again)
    assert chat(SYSTEM, ASKED) != chat({**SYSTEM, "content": "Be brief. " * 99 + "Be long.  "}, ASKED)
    assert chat(SYSTEM) is None
    parts = {"role": "user", "content": [{"type": "text", "text": "How deep?"}]}
    assert chat(parts) == chat(parts, answered) != chat(ASKED)


def test_a_prompt_without_messages_is_told_by_its_head() -> None:
    prompt = "".join(map(chr, range(40, 120)))
    assert conversation_of({"prompt": prompt}) == conversation_of({"prompt": prompt + " and more"}) is not None
    assert conversation_of({"prompt": list(range(64))}) == conversation_of({"prompt": list(range(90))}) is not None
    assert conversation_of({"input": prompt}) is not None
    for short in ({"prompt": "short"}, {"prompt": ["a"] * 70}, {"prompt": 5}, {}, {"messages": 7}, {"input": None}):
        assert conversation_of(short) is None


@given(st.dictionaries(st.sampled_from(["messages", "prompt", "input"]), JSON))
def test_no_request_is_too_strange(fields: dict[str, Any]) -> None:
    found = conversation_of(fields)
    assert found is None or found == conversation_of(fields)


def test_a_cache_is_dropped_when_no_worker_is_left_that_has_it() -> None:
    found = Conversations()
    found.follow({"a"}, set())
    assert not found.answer(1)
    assert not found.answer(1)
    # The worker is parked, and goes on.
    found.follow(set(), {"a"})
    found.follow({"a"}, set())
    assert found.is_known(1)
    assert found.answer(1)
    assert not found.answer(1)
    assert not found.answer(2), "nothing of it was cached before"
    # It ends, and another one starts.
    found.follow(set(), set())
    found.follow({"b"}, set())
    assert found.answer(1)
    assert found.answer(2)
    assert found.cold == 3


def test_a_cache_stays_while_one_worker_has_it() -> None:
    found = Conversations()
    found.follow({"a", "b"}, set())
    found.answer(1)
    found.follow({"b"}, {"a"})
    found.follow({"b", "c"}, set())
    # Nothing is heard of them for a moment.
    found.follow(set(), set())
    found.follow({"b"}, set())
    assert not found.answer(1)


def test_the_oldest_conversations_are_forgotten() -> None:
    found = Conversations(most=2)
    found.follow({"a"}, set())
    for conversation in (1, 2, 1, 3):
        found.answer(conversation)
    assert [found.is_known(each) for each in (1, 2, 3)] == [True, False, True]
    assert not found.is_known(None)
    assert not found.answer(None)
