"""The header that explains where a request went."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.messages.routing import RouteRow, WeighedWorker
from dynamo_local.core.routing.explanation import MOST_BYTES, described, header_value, is_asked, is_local


def route(candidates: int, name: str = "w") -> RouteRow:
    weighed = tuple(WeighedWorker(f"{name}{n}", 10.0 * n, 0, 10 * n, 0, 0) for n in range(candidates))
    return RouteRow(
        request_id="r", frontend="f", tokens=100, age_s=0.0, worker=weighed[0].worker, cached=0, candidates=weighed
    )


@given(st.lists(st.integers(1, 16), max_size=16), st.text(max_size=64))
def test_the_header_is_ascii_json_within_its_bound_and_counts_what_is_left_out(sizes: list[int], name: str) -> None:
    value = header_value([described(route(size, name), str) for size in sizes])
    assert len(value) <= MOST_BYTES
    told = json.loads(value.decode("ascii"))
    assert len(told) <= len(sizes)
    for size, each in zip(sizes, told, strict=False):
        assert len(each["candidates"]) + each["left_out"] == size


def test_a_decision_that_fits_is_told_whole() -> None:
    (told,) = json.loads(header_value([described(route(3), str)]))
    assert told["worker"] == "w0"
    assert [each["worker"] for each in told["candidates"]] == ["w0", "w1", "w2"]
    assert told["why"].startswith("its cost was the lowest, w1's the second")


@pytest.mark.parametrize(("value", "asked"), [(b"1", True), (b" true ", True), (b"0", False), (b"", False)])
def test_what_asks_for_it(value: bytes, asked: bool) -> None:
    assert is_asked(value) is asked


@pytest.mark.parametrize(
    ("client", "local"),
    [(("127.0.0.1", 5), True), (("::1", 5), True), (None, True), (("192.0.2.7", 5), False), (("client", 5), False)],
)
def test_who_is_on_this_machine(client: tuple[str, int] | None, local: bool) -> None:
    assert is_local({"client": client}) is local
