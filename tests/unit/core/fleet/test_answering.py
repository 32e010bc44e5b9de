from __future__ import annotations

from collections.abc import Collection

import pytest

from dynamo_local.core.fleet.view import last_answering

ROLES = {"a": "decode", "b": "aggregated", "p": "prefill", "f": "frontend"}


@pytest.mark.parametrize("leaving", [(), ("a",), ("b", "p", "f"), ("p", "f", "somebody")], ids=str)
def test_nothing_is_lost_while_a_worker_remains(leaving: Collection[str]) -> None:
    assert last_answering(ROLES, leaving) == ()


@pytest.mark.parametrize("leaving", [("a", "b"), ("b", "a", "p"), ("f", "a", "b", "somebody")], ids=str)
def test_the_last_workers_are_named(leaving: Collection[str]) -> None:
    assert last_answering(ROLES, leaving) == ("a", "b")


def test_where_nobody_answers_nobody_is_last() -> None:
    assert last_answering({"p": "prefill"}, {"p"}) == ()
    assert last_answering({}, ()) == ()
