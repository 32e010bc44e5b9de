"""The revisions that commands ask for."""

from __future__ import annotations

import pytest

from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import UsageError
from dynamo_local.core.messages.endpoints import Board, BoardRevision, EndpointStatus, EndpointView
from dynamo_local.supervisor.admin.asked import endpoint_names, known_revisions, shown_model

CHAT = EndpointView(EndpointSpec(name="chat", model="m"), EndpointStatus("updating"), 1.0, 2.0, ("chat",))
FAILED = EndpointView(EndpointSpec(name="broken", model="m"), EndpointStatus("failed"), 1.0, 2.0)
BOARD = Board(3, (BoardRevision("chat@10", False, ("chat",)), BoardRevision("chat@9", True, ("chat",))), (CHAT, FAILED))


def test_revisions_are_those_of_processes_and_of_the_board_after_the_graphs_own() -> None:
    assert known_revisions(["chat@9", "", "base@2", "chat@9"], BOARD) == ["", "base@2", "chat@9", "chat@10"]
    assert known_revisions([], None) == [""]


def test_the_revisions_of_one_endpoint_do_without_the_graphs_own() -> None:
    assert known_revisions(["", "base@2"], BOARD, "chat") == ["chat@9", "chat@10"]
    assert known_revisions(["", "base@2"], None, "base") == ["base@2"]
    assert known_revisions([""], BOARD, "broken") == []


def test_an_endpoint_that_there_is_not_is_refused_and_the_others_are_named() -> None:
    with pytest.raises(UsageError, match="there is no endpoint 'cha'; there are: base, broken, chat"):
        known_revisions(["base@2"], BOARD, "cha")
    with pytest.raises(UsageError, match="there are: none"):
        known_revisions([""], None, "")


def test_names_are_those_of_endpoints_with_or_without_processes() -> None:
    assert endpoint_names(["", "base@2", "base@3"], BOARD) == ["base", "broken", "chat"]


def test_a_model_is_named_by_its_revision() -> None:
    assert (shown_model("chat@2"), shown_model("")) == ("chat@2", "the server's own model")
