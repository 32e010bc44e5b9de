"""The contents of `dynamo top`, and its drawing."""

from __future__ import annotations

import io

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from dynamo_local.core.messages.presence import Counts
from dynamo_local.core.messages.reports import DecisionReport, Event
from dynamo_local.core.messages.work import QueueLength
from dynamo_local.monitor.scraping import FrontendFigures, Rates, ReadFigures, totals_by_model
from dynamo_local.monitor.screen import drawn
from dynamo_local.monitor.top import SHOWN_EVENTS, EventRow, TopView, note_counts, recent, view_of
from tests.unit.monitor.graph import DECODE, FRONTEND, MOVES, NOW, REPORT, ROUTER, STARTING, snapshot

FIGURES = FrontendFigures(in_flight=12, requests_per_s=3.25, ttft_s=0.0421, inter_token_s=1.5)
READ = ReadFigures(FIGURES, {})


def whole() -> TopView:
    return view_of("ns", snapshot(DECODE, STARTING, ROUTER, queue=QueueLength(2, 1), planner=REPORT), Rates(), READ)


def lines_of(view: TopView, width: int = 80, *, ascii_only: bool = False) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(drawn(view, width, ascii_only=ascii_only))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_everything_fits_into_eighty_columns() -> None:
    lines = lines_of(whole())
    assert max(map(len, lines)) <= 80
    assert lines[0].rstrip() == "ns  12 in flight  3.2 req/s  TTFT 42 ms  ITL 1.50 s"
    assert lines[1].rstrip() == "prefill queue: 2 waiting, 1 in hand"
    assert lines[2].rstrip() == "routing: kv  - req/s"
    worker = next(line for line in lines if line.startswith("VllmWorker "))
    assert worker.split() == ["VllmWorker", "decode", "ready", "3", "1", "██████░░", "75%", "-", "2m"]
    assert any("loading the .." in line for line in lines)
    assert any(line.startswith("planner load  2 of 8 devices  now: add a decode worker") for line in lines)
    assert any("mean KV 0.93 > 0.9" in line for line in lines)


def test_a_line_tells_what_the_router_does() -> None:
    rates, router = Rates(), ROUTER
    for tick, tokens in enumerate((1000, 2000, 3000)):
        counts = Counts(
            assigned=tick, routed_tokens=tokens, predicted_tokens=tokens // 2, pull_tokens=tokens // 50, policy="kv"
        )
        router = replace(ROUTER, counts=counts)
        note_counts(rates, router, NOW - 4 + 2 * tick)
    read = ReadFigures(FrontendFigures(cached_share=0.48), {})
    told = " ".join(" ".join(lines_of(view_of("ns", snapshot(router), rates, read), 120)).split())
    assert "routing: kv 0.5 req/s 50% of tokens expected in caches 48% of prompts found there 2% to pull" in told


@pytest.mark.parametrize("width", [40, 50, 60, 70, 80, 120])
def test_nothing_is_wider_than_the_terminal_and_no_number_is_cut(width: int) -> None:
    view = replace(whole(), migrations=MOVES, events=(EventRow(time=1.8e9, watcher="ns_VllmWorker", what="started"),))
    lines = lines_of(view, width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    whole_words = [
        "12 in flight",
        "3.2 req/s",
        "TTFT 42 ms",
        "ITL 1.50 s",
        "2 of 8 devices",
        "last gap 18 ms (1.9 steps)",
    ]
    assert [part for part in whole_words if part not in text] == []
    worker = next(line for line in lines if line.startswith("VllmWorker "))
    assert {"3", "75%"} <= set(worker.split())
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize(
    ("width", "headers"),
    [
        (120, "WATCHER ROLE STATE RUN WAIT KV TOK/S AGE"),
        (80, "WATCHER ROLE STATE RUN WAIT KV TOK/S AGE"),
        (65, "WATCHER ROLE STATE RUN WAIT KV TOK/S"),
        (60, "WATCHER STATE RUN WAIT KV TOK/S"),
        (45, "WATCHER STATE RUN WAIT KV"),
        (38, "WATCHER STATE RUN KV"),
    ],
)
def test_age_and_role_go_first_where_there_is_no_room(width: int, headers: str) -> None:
    heads = [line.split() for line in lines_of(whole(), width) if line.startswith("WATCHER")]
    assert heads[0] == headers.split()


def test_a_bar_becomes_a_share_before_another_column_goes() -> None:
    lines = lines_of(whole(), 50)
    assert any(line.split()[:5] == ["VllmWorker", "ready", "3", "1", "75%"] for line in lines)


def test_a_decision_that_is_repeated_is_one_line_with_its_number() -> None:
    again = DecisionReport(1.8e9, "no change (decode: load 0.6)", times=12, since=1.8e9 - 55)
    lines = lines_of(replace(whole(), planner=replace(REPORT, decisions=(again,))), 120)
    (line,) = (line for line in lines if "no change" in line)
    at, since = line.split()[0], line.split()[-1]
    assert line.split("  ", 1)[1].strip() == f"no change (decode: load 0.6), 12 times since {since}"
    assert at[3:] != since[3:]


def test_a_planner_that_only_observes_says_so() -> None:
    report = replace(REPORT, acts=False, changing=None)
    assert any(
        line.startswith("planner load  2 of 8 devices  only observes")
        for line in lines_of(replace(whole(), planner=report))
    )


def test_the_last_events_are_shown_and_repeated_ones_are_one() -> None:
    migrated = [
        Event("migration", f"migrated to ns_B, gap {gap} ms", watcher="ns_A", time=1.8e9 + gap, request=f"r{gap}")
        for gap in range(3)
    ]
    found = recent(
        [
            Event("start", "started", watcher="ns_A", time=1.0),
            Event("device", "claimed CPU slot 0", watcher="ns_A", time=1.0),
            *migrated,
            Event("death", "ended: exit code 1", watcher="ns_B", time=2.0),
        ]
    )
    assert [(row.watcher, row.what, row.times) for row in found] == [
        ("ns_A", "started", 1),
        ("ns_A", "migrated to ns_B, gap 2 ms", 3),
        ("ns_B", "ended: exit code 1", 1),
    ]
    assert len(recent([Event("start", f"started {name}") for name in "abcdefghij"])) == SHOWN_EVENTS
    lines = lines_of(replace(whole(), events=found))
    assert any(line.split()[1:] == ["B", "ended:", "exit", "code", "1"] for line in lines)
    assert any("migrated to ns_B, gap 2 ms, 3 times" in line for line in lines)


def test_a_lost_connection_is_shown() -> None:
    assert lines_of(replace(whole(), connected=False))[1].rstrip() == "NATS connection lost; reconnecting"


def test_long_names_and_reasons_do_not_break_the_table() -> None:
    view = whole()
    (first, *_) = view.workers
    long = replace(
        view,
        workers=(replace(first, watcher="ns_" + "W" * 60, role="aggregated"), *view.workers),
        planner=replace(REPORT, decisions=(DecisionReport(1.8e9, "no change " * 30, ("done",)),)),
    )
    lines = lines_of(long)
    assert max(map(len, lines)) <= 80
    cut = next(line for line in lines if line.startswith("WWW"))
    assert ".. " in cut
    assert "75%" in cut
    assert sum(line.count("no change") for line in lines) == 30


def test_migrations_are_told_of_once_there_are_any() -> None:
    assert not any("migrations" in line for line in lines_of(whole()))
    lines = lines_of(view_of("ns", snapshot(FRONTEND), Rates(), None))
    assert lines[1].rstrip() == "migrations: 5 done, 1 not  last gap 18 ms (1.9 steps)"


def test_a_terminal_without_unicode_gets_a_bar_nevertheless() -> None:
    lines = lines_of(whole(), ascii_only=True)
    assert any("######..  75%" in line for line in lines)


def test_an_empty_graph_can_be_drawn() -> None:
    assert lines_of(view_of("ns", snapshot(), Rates(), None)) == ["ns"]


@pytest.mark.parametrize(("role", "rate"), [("decode", 20.0), ("prefill", 100.0)])
def test_the_tokens_that_count_are_those_of_the_role(role: str, rate: float) -> None:
    rates = Rates()
    for tick in range(5):
        counts = Counts(requests=tick, prompt_tokens=tick * 100, output_tokens=tick * 20)
        note_counts(rates, replace(DECODE, counts=counts), NOW - 4 + tick)
    (row,) = view_of("ns", snapshot(replace(DECODE, role=role)), rates, None).workers
    assert row.tokens_per_s == rate


def test_a_ready_worker_that_may_be_given_nothing_is_not_called_ready() -> None:
    (row,) = view_of("ns", snapshot(DECODE, routable=frozenset()), Rates(), None).workers
    assert row.state == "revoked"


def test_the_view_is_json_with_null_for_what_is_unknown() -> None:
    found = msgspec.json.decode(msgspec.json.encode(whole()))
    assert found["workers"][1]["kv_usage"] is None
    assert found["queue"] == {"waiting": 2, "in_hand": 1}
    assert found["frontend"]["ttft_s"] == 0.0421
    assert found["planner"]["policy"] == "load"


def test_series_of_a_model_are_added_up() -> None:
    text = (
        "# TYPE vllm:request_success counter\n"
        'vllm:request_success_total{model_name="chat",finished_reason="stop"} 3\n'
        'vllm:request_success_total{model_name="chat",finished_reason="length"} 4\n'
        'vllm:request_success_total{model_name="base",finished_reason="length"} 2\n'
        "# TYPE dynamo_frontend_requests_in_flight gauge\n"
        'dynamo_frontend_requests_in_flight{model="chat"} 5\n'
        "# TYPE dynamo_frontend_requests_held gauge\n"
        'dynamo_frontend_requests_held{model="chat"} 2\n'
        "# TYPE other gauge\nother 9\n"
    )
    assert totals_by_model(text) == {
        "chat": {
            "vllm:request_success_total": 7,
            "dynamo_frontend_requests_in_flight": 5,
            "dynamo_frontend_requests_held": 2,
        },
        "base": {"vllm:request_success_total": 2},
    }


def test_what_is_no_exposition_is_refused() -> None:
    with pytest.raises(ValueError, match=r"invalid|Invalid|<html>"):
        totals_by_model("<html>")
