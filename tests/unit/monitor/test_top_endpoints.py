"""Endpoints in `dynamo top`: a heading for each revision, with its workers below."""

from __future__ import annotations

import io

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.messages.endpoints import Board, EndpointHistory, EndpointStatus, EndpointView
from dynamo_local.core.messages.presence import Counts, Load, Presence
from dynamo_local.core.messages.reports import EndpointReport, Event
from dynamo_local.core.messages.work import QueueLength
from dynamo_local.monitor.scraping import FrontendFigures, Rates, ReadFigures
from dynamo_local.monitor.screen import drawn
from dynamo_local.monitor.top import TopView, note_counts, recent, view_of
from tests.unit.monitor.graph import DECODE, NOW, REPORT, ROUTER, snapshot


def worker(revision: str, index: int = 0, kv_usage: float = 0.5) -> Presence:
    suffix = f"_{index}" if index else ""
    lease = f"{revision}-{index}"
    return replace(
        DECODE,
        watcher=f"ns_{revision}_VllmWorker{suffix}",
        lease=lease,
        revision=revision,
        load=Load(running=3, waiting=1, kv_usage=kv_usage),
    )


def endpoint(name: str, status: EndpointStatus, adapter_of: str | None = None) -> EndpointView:
    return EndpointView(EndpointSpec(name=name, model="m", adapter_of=adapter_of), status, 1.0, 2.0, (name,))


CHAT = endpoint("chat", EndpointStatus("updating", "revision 10 starts", revision=9, wanted=2, ready=2))
BROKEN = endpoint("broken", EndpointStatus("failed", "its model has no weights"))
TUNED = endpoint("tuned", EndpointStatus("ready", "served by chat"), adapter_of="chat")
BOARD = Board(7, (), (BROKEN, CHAT, TUNED))
WORKERS = [worker("chat@9", kv_usage=0.25), worker("chat@9", 1, kv_usage=0.75), worker("chat@10")]
LEASES = frozenset({presence.lease for presence in WORKERS} | {"d"})
FIGURES = FrontendFigures(in_flight=12, held=2, ttft_s=0.0421)


def whole(*members: Presence, board: Board | None = BOARD) -> TopView:
    rates = Rates()
    for presence in WORKERS:
        for tick in range(5):
            note_counts(rates, replace(presence, counts=Counts(output_tokens=tick * 20)), NOW - 4 + tick)
    figures = ReadFigures(FrontendFigures(in_flight=13), {"chat": FIGURES})
    seen = snapshot(*(members or (*WORKERS, ROUTER)), routable=LEASES)
    return view_of("ns", seen, rates, figures, board=board, queues={"chat@9": QueueLength(2, 1)})


def lines_of(view: TopView, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(drawn(view, width))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_an_endpoint_that_is_awake_has_a_line_with_what_was_done_to_it_last() -> None:
    history = EndpointHistory(wakes={"request": 1}, last="woken by a request: it was asleep", last_at=0.0)
    awake = replace(endpoint("chat", EndpointStatus("ready", revision=9)), history=history)
    asleep = replace(endpoint("rare", EndpointStatus("asleep", "no request for 15 min")), history=history)
    text = lines_of(whole(board=Board(7, (), (awake, asleep))))
    told = [line for line in text if line.endswith(" woken by a request: it was asleep")]
    assert len(told) == 1
    assert text.index("no request for 15 min") > text.index(told[0])


def test_an_endpoint_has_its_state_numbers_and_the_figures_of_all_its_workers() -> None:
    broken, chat, tuned = whole().endpoints
    assert (chat.name, chat.revision, chat.state, chat.ready, chat.wanted) == ("chat", "chat@9", "updating", 2, 2)
    assert (chat.tokens_per_s, chat.kv_usage) == (60.0, 0.5)
    assert chat.frontend == FIGURES
    assert chat.queue == QueueLength(2, 1)
    assert (broken.state, broken.reason) == ("failed", "its model has no weights")
    assert (broken.tokens_per_s, broken.kv_usage, broken.frontend, broken.queue) == (None, None, None, None)
    assert tuned.adapter_of == "chat"


def test_workers_stand_below_the_heading_of_their_revision() -> None:
    lines = lines_of(whole(), 120)
    assert lines[0] == "ns  13 in flight  - req/s  TTFT -  ITL -"
    begin = lines.index("broken@1  failed  0 of 0 workers")
    end = next(index for index, line in enumerate(lines) if index > begin and not line)
    words = [" ".join(line.split()[:3]) for line in lines[begin:end]]
    assert words == [
        "broken@1 failed 0",
        "its model has",
        "chat@9 updating 2",
        "revision 10 starts",
        "WATCHER ROLE STATE",
        "VllmWorker decode ready",
        "VllmWorker_1 decode ready",
        "chat@10 takes no",
        "VllmWorker decode ready",
        "tuned ready adapter",
        "served by chat",
    ]
    assert (
        "chat@9  updating  2 of 2 workers  12 in flight  2 held  60 tok/s  KV 50%  TTFT 42 ms  "
        "queue: 2 waiting, 1 in hand" in lines
    )
    # The columns of all tables are below each other.
    assert len({line.index("ready") for line in lines if line.startswith("VllmWorker")}) == 1


def test_workers_of_the_graphs_own_model_come_first_and_without_a_heading() -> None:
    lines = lines_of(whole(DECODE, *WORKERS))
    first = next(index for index, line in enumerate(lines) if line.startswith("WATCHER"))
    assert lines[first + 1].startswith("VllmWorker")
    assert lines[first + 2].startswith("broken@1")


def test_an_old_revision_finishes() -> None:
    board = Board(8, (), (msgspec.structs.replace(CHAT, status=EndpointStatus("updating", revision=10)),))
    assert "chat@9  finishes its requests" in lines_of(whole(board=board))


def test_workers_without_a_board_are_shown_by_their_revision() -> None:
    lines = lines_of(whole(board=None))
    assert "chat@9" in lines
    assert "chat@10" in lines


@pytest.mark.parametrize("width", [40, 50, 60, 80])
def test_nothing_is_wider_than_the_terminal_and_no_number_is_cut(width: int) -> None:
    lines = lines_of(whole(DECODE, *WORKERS, ROUTER), width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert [part for part in ("2 of 2 workers", "12 in flight", "60 tok/s", "TTFT 42 ms") if part not in text] == []
    assert not any("…" in line for line in lines)
    assert sum(line.startswith("VllmWorker") for line in lines) == 4


def test_endpoints_without_any_worker_are_shown() -> None:
    lines = lines_of(whole(ROUTER))
    assert [line.split()[0] for line in lines if line.startswith(("broken", "chat", "tuned"))] == [
        "broken@1",
        "chat@9",
        "tuned",
    ]


def test_the_view_has_the_endpoints_in_json() -> None:
    found = msgspec.json.decode(msgspec.json.encode(whole()))
    assert [row["name"] for row in found["endpoints"]] == ["broken", "chat", "tuned"]
    assert {row["revision"] for row in found["workers"]} == {"chat@9", "chat@10"}


def test_events_of_endpoints_have_their_names() -> None:
    events = recent([Event("endpoint", "ready", endpoint=name, time=1.8e9) for name in ("chat", "chat", "base")])
    assert [(row.endpoint, row.times) for row in events] == [("chat", 2), ("base", 1)]
    assert any(line.split()[1:] == ["base", "ready"] for line in lines_of(replace(whole(), events=events)))


def test_what_the_planner_wants_for_an_endpoint_is_shown_with_what_it_gets() -> None:
    reports = (
        EndpointReport("chat", "decode", ordered=2, ready=2, in_flight=40, wanted=5, share=3),
        EndpointReport("chat", "prefill", ordered=1, wanted=2, share=2),
        EndpointReport("chat", "aggregated", ordered=1),
        EndpointReport("base", "decode", ordered=1, wanted=1, share=1),
    )
    seen = snapshot(*WORKERS, routable=LEASES, planner=replace(REPORT, endpoints=reports))
    view = view_of("ns", seen, Rates(), None, board=BOARD)
    _, chat, _ = view.endpoints
    assert chat.planned == reports[:2]
    (line,) = (line for line in lines_of(view, 160) if line.startswith("chat@9"))
    assert line.endswith("planner: wants 5, gets 3  planner: wants 2 prefill")
    assert max(map(len, lines_of(view, 60))) <= 60
