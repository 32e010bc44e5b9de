"""`dynamo route` and `dynamo usage`."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from dynamo_local.cli.look import text_of_routes, usage
from dynamo_local.core.errors import UsageError
from dynamo_local.core.messages.routing import RouteRow, RoutesAnswer, WeighedWorker
from dynamo_local.core.routing.explanation import described, header_value
from dynamo_local.core.usage.records import UsageRecord
from dynamo_local.supervisor.admin.handlers import view_of
from state.paths import StatePaths
from state.usage.journal import UsageJournal

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
    assert text_of_routes(view, explain=False).splitlines() == [
        "policy kv",
        "REQUEST    WORKER      TOKENS  CACHED  PULLS FROM  AGE",
        "other      -           7       -       -           1.0s",
        "cmpl-12ab  VllmWorker  100     64      -           2.0s",
    ]
    assert view.routes[0].endpoint == "chat"


def test_one_request_is_explained_by_its_candidates() -> None:
    view = view_of([RoutesAnswer("kv", (OTHER, ROW))], NAMES, 10, "cmpl-1")
    assert text_of_routes(view, explain=True).splitlines() == [
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
    assert text_of_routes(view, explain=True).splitlines()[-2:] == [
        "   WORKER      COST    CACHED  UNCACHED  QUEUED  REQUESTS  PLACE   PREFILL  STEP",
        ">  VllmWorker  0.512s  64      36        0       4         0.500s  0.004s   0.008s",
    ]


def test_nothing_is_said_so() -> None:
    view = view_of([RoutesAnswer("random", (ROW,))], {}, 10, "none")
    assert text_of_routes(view, explain=True) == "policy random; no such request was assigned lately"
    assert view_of([RoutesAnswer("kv", (ROW,))], {}, 10).routes[0].worker == "a"


def test_json_and_the_header_of_an_answer_name_workers_alike() -> None:
    (line,) = view_of([RoutesAnswer("kv", (ROW,))], NAMES, 10).routes
    (told,) = json.loads(header_value([described(ROW, NAMES.__getitem__)]))
    shown = json.loads(msgspec.json.encode(line))
    assert told == {key: value for key, value in shown.items() if key in told}
    assert told["worker"] == "ns_VllmWorker"
    assert "VllmWorker_1's the second" in told["why"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("DYN_NAMESPACE", raising=False)
    journal = UsageJournal(StatePaths(tmp_path, "shop"), "lease", print)
    now = time.time()
    for age_s, key in ((0, "team-a"), (0, None), (3 * 86400, "team-a")):
        journal.write(UsageRecord(now - age_s, "chat", key, prompt=7, cached=3, output=2, seconds=0.5))
    journal.close()
    return CliRunner()


def shown(run: CliRunner, *arguments: str) -> Result:
    return run.invoke(usage, arguments, catch_exceptions=True)


def test_a_table_has_groups_and_a_total(run: CliRunner) -> None:
    head, names, *rows = shown(run).output.splitlines()
    assert head.startswith("usage")
    assert names.split() == ["KEY", "ENDPOINT", "REQUESTS", "FAILED", "PROMPT", "CACHED", "OUTPUT", "SECONDS"]
    assert [row.split() for row in rows] == [
        ["-", "chat", "1", "0", "7", "3", "2", "0.5"],
        ["team-a", "chat", "2", "0", "14", "6", "4", "1.0"],
        ["total", "3", "0", "21", "9", "6", "1.5"],
    ]
    assert "no request" in shown(run, "--until", "30d").output


def test_json_and_csv_have_what_was_asked_for(run: CliRunner) -> None:
    found = json.loads(shown(run, "--since", "1d", "--by", "key", "--json").output)
    assert [(row["key"], row["prompt_tokens"]) for row in found["data"]] == [(None, 7), ("team-a", 7)]
    (row,) = csv.DictReader(shown(run, "--by", "", "--csv", "--namespace", "shop").output.splitlines())
    assert (row["requests"], row["cached_tokens"], row["seconds"]) == ("3", "9", "1.5")


@pytest.mark.parametrize("wrong", [("--since", "soon"), ("--by", "color"), ("--json", "--csv")])
def test_mistakes_are_told(run: CliRunner, wrong: tuple[str, str]) -> None:
    result = shown(run, *wrong)
    assert isinstance(result.exception, UsageError)
