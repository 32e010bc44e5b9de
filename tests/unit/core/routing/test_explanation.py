"""The reasons of an assignment follow from its figures."""

from __future__ import annotations

import pytest

from dynamo_local.core.messages.routing import RouteRow, WeighedWorker
from dynamo_local.core.routing.explanation import why


def weighed(worker: str, cost: float, cached: int = 0, *, failed: bool = False) -> WeighedWorker:
    return WeighedWorker(worker, cost, cached, 100 - cached, 0, 0, failed)


def route(*candidates: WeighedWorker, worker: str | None = "a", cached: int | None = 0, **more: str) -> RouteRow:
    return RouteRow(
        request_id="r",
        frontend="f",
        tokens=100,
        age_s=1.0,
        worker=worker,
        cached=cached,
        candidates=candidates,
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (route(worker=None), "no worker was ready"),
        (route(weighed("a", 1.0), cached=None), "no other worker was ready"),
        (route(weighed("a", 1.0), weighed("b", 1.0), weighed("c", 2.0), cached=None), "one of 2 with the lowest cost"),
        (
            route(weighed("a", 1.0, 64), weighed("b", 3.0), weighed("c", 2.0), cached=64),
            "its cost was the lowest, C's the second; it has 64 tokens of the prefix, and nobody has more",
        ),
        (
            route(weighed("a", 1.0, 16), weighed("b", 2.0, 64), cached=16),
            "its cost was the lowest, B's the second; B has 48 more tokens of the prefix, and more to do",
        ),
        (
            route(weighed("a", 1.0), weighed("b", 2.0, 64), pull_from="b"),
            "its cost was the lowest, B's the second; it pulls what it lacks of the prefix from B",
        ),
        (
            route(weighed("b", 0.0, failed=True), weighed("a", 1.0)),
            "no other worker was ready; B had just failed the request; nobody has the prefix",
        ),
    ],
)
def test_reasons(row: RouteRow, reason: str) -> None:
    assert why(row, str.upper) == reason
