"""The requests and workers that `dynamo migrate` selects."""

from __future__ import annotations

import pytest

from dynamo_local.cli.requests import table_of_requests
from dynamo_local.control.answers import WatcherRow
from dynamo_local.core.errors import UsageError
from dynamo_local.core.messages.admin import HeldRow, RequestLine, RequestsAnswer
from dynamo_local.core.names import parse_watcher
from dynamo_local.core.request.log import told_id
from dynamo_local.supervisor.admin.requests import Scope, _of_frontend, check_destination, meant_by, worker_of


def owned(*request_ids: str) -> tuple[RequestLine, ...]:
    return tuple(
        RequestLine(request=request_id, epoch=1, worker="w", prompt_tokens=10, tokens=5, age_s=1.0)
        for request_id in request_ids
    )


def row(watcher: str, role: str, state: str = "ready", lease: str | None = "lease") -> WatcherRow:
    revision = parse_watcher(watcher).revision or "main@1"
    return WatcherRow(
        watcher=watcher, component="W", role=role, revision=revision, pid=1, devices=(), state=state, lease=lease
    )


@pytest.mark.parametrize(
    ("request_id", "told"),
    [
        ("cmpl-a2739b079da931fb-0-a428450a", "cmpl-a2739b079da931fb"),
        ("cmpl-a2739b079da931fb-11-a428450a", "cmpl-a2739b079da931fb"),
        ("1_cmpl-a2739b079da931fb-0-a428450a", "cmpl-a2739b079da931fb"),
        ("chatcmpl-a2739b079da931fb-a428450a", "chatcmpl-a2739b079da931fb"),
        # Of digits only: no number of a prompt, which chats do not have.
        ("chatcmpl-1234567890123456-a428450a", "chatcmpl-1234567890123456"),
        ("cmpl-1234567890123456-0-12345678", "cmpl-1234567890123456"),
        ("0_chatcmpl-my-own-id-a428450a", "chatcmpl-my-own-id"),
        ("something else", "something else"),
    ],
)
def test_the_client_knows_a_request_by_part_of_its_id(request_id: str, told: str) -> None:
    assert told_id(request_id) == told


CHOICES = ("0_cmpl-abc-0-00000001", "1_cmpl-abc-0-00000001")
FRONTENDS = {"f1": owned(*CHOICES, "cmpl-xyz-0-00000002"), "f2": owned("cmpl-abd-0-00000003")}


def test_the_beginning_of_an_id_is_enough_and_means_all_choices() -> None:
    assert meant_by("cmpl-x", FRONTENDS) == {"f1": ("cmpl-xyz-0-00000002",)}
    assert meant_by("cmpl-abd", FRONTENDS) == {"f2": ("cmpl-abd-0-00000003",)}
    assert meant_by("cmpl-abc", FRONTENDS) == {"f1": CHOICES}


def test_what_may_mean_several_requests_or_none_is_refused() -> None:
    with pytest.raises(UsageError, match="means 2 requests; it may be cmpl-abc or cmpl-abd"):
        meant_by("cmpl-ab", FRONTENDS)
    with pytest.raises(UsageError, match="there is no request 'abc'"):
        meant_by("abc", FRONTENDS)
    with pytest.raises(UsageError, match="there is no request"):
        meant_by("cmpl", {})
    # Any id begins with nothing, also if there is only one.
    with pytest.raises(UsageError, match="no request is named"):
        meant_by("", {"f1": owned("cmpl-xyz-0-00000002")})


ROWS = [row("n_Front", "frontend"), row("n_W", "decode"), row("n_W_1", "decode", "draining"), row("n_P", "prefill")]


def test_requests_go_to_ready_workers_and_leave_any() -> None:
    assert worker_of(ROWS, "n_W", ready=True).lease == "lease"
    assert worker_of(ROWS, "n_W_1", ready=False).lease == worker_of(ROWS, "W_1", ready=False).lease == "lease"
    assert worker_of(ROWS, "n_P", ready=False).lease == "lease"
    with pytest.raises(UsageError, match="n_W_1 is not ready but draining"):
        worker_of(ROWS, "n_W_1", ready=True)


@pytest.mark.parametrize("watcher", ["n_Front", "n_P", "", "n_W_7"])
def test_nothing_goes_to_who_decodes_nothing(watcher: str) -> None:
    with pytest.raises(UsageError, match="there are: W, W_1"):
        worker_of(ROWS, watcher, ready=True)


def test_a_prefill_worker_is_told_from_none() -> None:
    with pytest.raises(UsageError, match="n_P prefills, and decodes nothing; there are: W, W_1"):
        worker_of(ROWS, "n_P", ready=True)
    with pytest.raises(UsageError, match="there is no worker 'n_W'; there are: none"):
        worker_of(ROWS[:1], "n_W", ready=False)


OF_ENDPOINTS = [*ROWS, row("n_chat@1_W", "decode"), row("n_chat@2_W", "decode")]


def test_a_request_migrates_within_its_revision_only() -> None:
    new = worker_of(OF_ENDPOINTS, "chat@2_W", ready=True)
    check_destination(new, {"chat@2"})
    check_destination(None, {"chat@1", "chat@2", "main@1"})
    with pytest.raises(
        UsageError, match="chat@2_W serves chat@2, not chat@1; a request migrates between workers of on"
    ):
        check_destination(new, {"chat@1"})
    with pytest.raises(UsageError, match="chat@2_W serves chat@2, not the server's own model"):
        check_destination(new, {"main@1"})
    with pytest.raises(UsageError, match="W serves the server's own model, not chat@1"):
        check_destination(worker_of(OF_ENDPOINTS, "W", ready=True), {"chat@1"})


def line(request: str, endpoint: str = "") -> RequestLine:
    return RequestLine(
        request=request,
        worker="n_W",
        endpoint=endpoint,
        epoch=1,
        prompt_tokens=5,
        tokens=3,
        age_s=1.0,
        moving_to=None,
        stays=None,
        frontend="n_Frontend",
    )


def test_a_request_that_is_held_is_shown_with_its_reason() -> None:
    (found,), left_out = _of_frontend(
        "f1",
        {"f1": "n_Frontend"},
        {Scope("f1", "chat@1"): RequestsAnswer((), 2, (HeldRow(1, 3.5, "endpoint chat is asleep"),))},
        None,
        10,
    )
    assert (found.endpoint, found.age_s, found.held, left_out) == ("chat", 3.5, "endpoint chat is asleep", 2)
    shown = table_of_requests([found]).splitlines()[1].split()
    assert shown == ["-", "chat", "held", "-", "-", "-", "3.5s", "waits:", "endpoint", "chat", "is", "asleep"]


def test_the_table_has_a_column_of_endpoints_only_if_a_request_is_for_one() -> None:
    assert table_of_requests([line("cmpl-1")]).split()[:3] == ["REQUEST", "WORKER", "EPOCH"]
    header, first, second = (
        text.split() for text in table_of_requests([line("cmpl-1"), line("cmpl-2", "chat")]).splitlines()
    )
    assert header[:3] == ["REQUEST", "ENDPOINT", "WORKER"]
    assert (first[:3], second[:3]) == (["cmpl-1", "-", "W"], ["cmpl-2", "chat", "W"])
