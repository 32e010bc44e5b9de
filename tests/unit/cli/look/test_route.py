"""Assignments as text, from the answers of routers."""

from __future__ import annotations

import json

import msgspec
from msgspec.structs import replace

from dynamo_local.cli.look.route import text_of
from dynamo_local.core.messages.routes import RouteRow, RoutesAnswer, WeighedWorker
from dynamo_local.core.routing.explanation import described, header_value
from dynamo_local.supervisor.admin.handlers import view_of

NAMES = {"a": "ns_VllmWorker", "b": "ns_VllmWorker_1"}
ROW = RouteRow(
    request_id="cmpl-12ab-0-89abcdef",
    frontend="f",
    tokens=100,
    age_s=2.04,
    worker="a",
    cached=64,
    candidates=(WeighedWorker("a", 72.0, 64, 36, 0, 1), WeighedWorker("b", 200.0, 0, 100, 0, 0)),
    left_out=3,
)
OTHER = RouteRow(request_id="other", revision="chat@2", frontend="f", tokens=7, age_s=1.0, worker=None)


def test_the_latest_of_all_routers_come_first_by_the_names_of_workers() -> None:
    view = view_of([RoutesAnswer("kv", (ROW,)), RoutesAnswer("kv", (OTHER,))], NAMES, 10)
    assert text_of(view, explain=False).splitlines() == [
        "policy kv",
        "REQUEST    WORKER      TOKENS  CACHED  PULLS FROM  AGE",
        "other      -           7       -       -           1.0s",
        "cmpl-12ab  VllmWorker  100     64      -           2.0s",
    ]
    assert view.routes[0].endpoint == "chat"


def test_one_request_is_explained_by_its_candidates() -> None:
    view = view_of([RoutesAnswer("kv", (OTHER, ROW))], NAMES, 10, "cmpl-1")
    assert text_of(view, explain=True).splitlines() == [
        "policy kv",
        "",
        "cmpl-12ab, 100 tokens, 2.0s ago",
        "to VllmWorker: its cost was the lowest, VllmWorker_1's the second; it has 64 tokens of the prefix, and nobody "
        "has more",
        "   WORKER        COST  CACHED  UNCACHED  QUEUED  REQUESTS",
        ">  VllmWorker    72    64      36        0       1",
        "   VllmWorker_1  200   0       100       0       0",
        "and 3 more",
    ]


def test_a_cost_that_is_a_time_is_explained_by_its_parts() -> None:
    here = WeighedWorker("a", 0.5125, 64, 36, 0, 4, place_s=0.5, prefill_s=0.0042, step_s=0.008)
    view = view_of([RoutesAnswer("kv", (replace(ROW, candidates=(here,), left_out=0),))], NAMES, 10)
    assert text_of(view, explain=True).splitlines()[-2:] == [
        "   WORKER      COST    CACHED  UNCACHED  QUEUED  REQUESTS  PLACE   PREFILL  STEP",
        ">  VllmWorker  0.512s  64      36        0       4         0.500s  0.004s   0.008s",
    ]


def test_nothing_is_said_so() -> None:
    view = view_of([RoutesAnswer("random", (ROW,))], {}, 10, "none")
    assert text_of(view, explain=True) == "policy random; no such request was assigned lately"
    assert view_of([RoutesAnswer("kv", (ROW,))], {}, 10).routes[0].worker == "a"


def test_json_and_the_header_of_an_answer_name_workers_alike() -> None:
    (line,) = view_of([RoutesAnswer("kv", (ROW,))], NAMES, 10).routes
    (told,) = json.loads(header_value([described(ROW, NAMES.__getitem__)]))
    shown = json.loads(msgspec.json.encode(line))
    assert told == {key: value for key, value in shown.items() if key in told}
    assert told["worker"] == "ns_VllmWorker"
    assert "VllmWorker_1's the second" in told["why"]
