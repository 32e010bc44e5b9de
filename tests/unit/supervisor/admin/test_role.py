"""The workers that `dynamo role` asks, and those that it refuses."""

from __future__ import annotations

import pytest

from dynamo_local.control.answers import WatcherRow
from dynamo_local.core.errors import UsageError
from dynamo_local.core.names import parse_watcher
from dynamo_local.supervisor.admin.watchers import worker_to_ask


def row(watcher: str, role: str, state: str = "ready", lease: str | None = "lease") -> WatcherRow:
    lease = None if lease is None else f"{lease} of {watcher}"
    revision = parse_watcher(watcher).revision
    return WatcherRow(
        watcher=watcher, component="W", role=role, revision=revision, pid=1, devices=(), state=state, lease=lease
    )


PAIR = [row("n_Front", "frontend"), row("n_W", "decode"), row("n_P", "prefill")]


@pytest.mark.parametrize(("watcher", "role"), [("n_P", "decode"), ("n_P", "prefill"), ("n_W", "decode")], ids=str)
def test_a_ready_worker_is_asked(watcher: str, role: str) -> None:
    assert worker_to_ask(PAIR, watcher, role).lease == f"lease of {watcher}"
    assert worker_to_ask(PAIR, watcher.removeprefix("n_"), role).lease == f"lease of {watcher}"


def test_the_only_one_that_decodes_is_asked_only_with_force() -> None:
    with pytest.raises(UsageError, match=r"n_W is the only one that decodes; .*--force"):
        worker_to_ask(PAIR, "n_W", "prefill")
    with pytest.raises(UsageError, match="W is the only one that decodes"):
        worker_to_ask(PAIR, "W", "prefill")
    assert worker_to_ask(PAIR, "n_W", "prefill", even_the_last=True).lease == "lease of n_W"


@pytest.mark.parametrize(("state", "asked"), [("ready", True), ("starting", False), ("ended", False)])
def test_another_one_must_be_ready_to_take_its_place(state: str, asked: bool) -> None:
    found = [*PAIR, row("n_W_1", "decode", state)]
    if asked:
        assert worker_to_ask(found, "n_W", "prefill").lease == "lease of n_W"
    else:
        with pytest.raises(UsageError, match="only one"):
            worker_to_ask(found, "n_W", "prefill")


def test_a_worker_of_another_model_does_not_take_its_place() -> None:
    chat = [row("n_chat@2_W", "decode"), row("n_chat@2_P", "prefill")]
    with pytest.raises(UsageError, match="W is the only one that decodes"):
        worker_to_ask([*PAIR, *chat], "chat@2_W", "prefill")
    third = row("n_chat@2_W_1", "decode")
    assert worker_to_ask([*PAIR, *chat, third], "chat@2_W", "prefill").revision == "chat@2"


@pytest.mark.parametrize("watcher", ["n_Front", "Front", "", "n_W_7"])
def test_who_is_no_worker_is_not_asked_and_the_workers_are_named(watcher: str) -> None:
    with pytest.raises(UsageError, match="there are: W, P"):
        worker_to_ask(PAIR, watcher, "prefill")


@pytest.mark.parametrize(("state", "lease"), [("starting", "l"), ("draining", "l"), ("ended", None), ("ready", None)])
def test_who_is_not_ready_is_not_asked(state: str, lease: str | None) -> None:
    with pytest.raises(UsageError, match=f"n_P_1 is not ready but {state}"):
        worker_to_ask([*PAIR, row("n_P_1", "prefill", state, lease)], "n_P_1", "decode")


def test_in_a_graph_without_prefill_workers_there_is_nothing_to_choose() -> None:
    with pytest.raises(UsageError, match="no prefill workers"):
        worker_to_ask([row("n_Front", "frontend"), row("n_W", "aggregated")], "n_W", "prefill")
