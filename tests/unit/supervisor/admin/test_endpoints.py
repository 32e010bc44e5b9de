"""What becomes of orders about endpoints, as their sender learns it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from dynamo_local.control.client import ControlClient
from dynamo_local.control.operations import GET_ENDPOINT, Call
from dynamo_local.core.endpoints.checks import read_spec
from dynamo_local.core.errors import DynamoError, EndpointAbsentError, SupervisorError, UsageError
from dynamo_local.core.messages.endpoints import EndpointState, EndpointStatus, EndpointView, progress_of, shown
from dynamo_local.core.messages.reports import STATE, Event
from dynamo_local.supervisor.admin.endpoints import EndpointClient, is_done
from dynamo_local.supervisor.control.api import ControlApi
from dynamo_local.supervisor.control.reports import EventAnswers
from dynamo_local.supervisor.server.reports.event_log import RecentEvents
from state.locks import ServerLock
from state.paths import StatePaths
from tests.unit.supervisor.control.listening import listening
from tests.unit.supervisor.recording import RecordingReport

_T = TypeVar("_T")
PATIENCE_S = 20.0


def view(state: EndpointState = "ready", reason: str = "", model: str = "m", **counts: int) -> EndpointView:
    return EndpointView(read_spec({"name": "chat", "model": model}), EndpointStatus(state, reason, **counts), 0.0, 0.0)


GONE = EndpointAbsentError("there is no endpoint 'chat'", "there are: none")


class Server:
    """A server with the one endpoint: it is as these answers say in turn, and as the last one from then on. It changes
    whenever it has been asked for."""

    def __init__(self, *answers: EndpointView | DynamoError) -> None:
        self._answers = list(answers)
        self.recent = RecentEvents(1000.0)

    async def get(self, _: Call) -> Any:
        answer = self._answers[0]
        if len(self._answers) > 1:
            del self._answers[0]
            self.recent.add(Event(STATE, "other", endpoint="another"))
            self.recent.add(Event(STATE, "changed", endpoint="chat"))
        if isinstance(answer, DynamoError):
            raise answer
        return msgspec.to_builtins(shown(answer))


@dataclass
class Asking:
    """Asks a server, in a thread, as a command does."""

    folder: Path

    async def __call__(self, work: Callable[[EndpointClient], _T], *answers: EndpointView | DynamoError) -> _T:
        paths, server, api = StatePaths(self.folder, "dynamo"), Server(*answers), ControlApi()
        api.take({GET_ENDPOINT: server.get, **EventAnswers(server.recent).handlers})
        with ServerLock(paths):
            async with listening(api, paths, server.recent.end), asyncio.timeout(PATIENCE_S):
                return await asyncio.to_thread(work, EndpointClient(ControlClient(paths)))


@pytest.fixture
def ask(tmp_path: Path) -> Asking:
    return Asking(tmp_path)


async def test_progress_is_told_until_it_is_ready(ask: Asking) -> None:
    report = RecordingReport()
    steps = [view("fetching", "model m"), view("starting", wanted=2), view("starting", wanted=2, ready=1), view()]
    done = await ask(lambda client: client.wait_until_ready(view("waiting"), PATIENCE_S, report), *steps)
    assert done == view()
    assert report.lines == [
        "chat is waiting",
        "chat is fetching: model m",
        "chat is starting: 0 of 2 workers ready",
        "chat is starting: 1 of 2 workers ready",
    ]


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (
            view("failed", "there is no model m"),
            r"endpoint chat has failed: there is no model m; it stays ordered",
        ),
        (view("deleting"), r"endpoint chat is being deleted"),
        (view("ready", "other cannot be loaded", "old"), r"update of endpoint chat failed: other cannot be loaded"),
        (view("ready", "", "third"), r"endpoint chat was changed meanwhile"),
        (GONE, r"there is no endpoint 'chat'"),
    ],
)
async def test_what_never_becomes_ready_is_an_error(ask: Asking, end: Any, said: str) -> None:
    with pytest.raises(DynamoError, match=said):
        await ask(
            lambda client: client.wait_until_ready(view("starting"), PATIENCE_S, RecordingReport()),
            *(view("starting"), end),
        )


async def test_what_takes_too_long_stays_ordered(ask: Asking) -> None:
    with pytest.raises(SupervisorError, match=r"not ready after 0\.01 s: chat is waiting: no device; it stays ordered"):
        await ask(
            lambda client: client.wait_until_ready(view("starting"), 0.01, RecordingReport()),
            view("waiting", "no device"),
        )


async def test_deletion_is_done_when_it_is_gone(ask: Asking) -> None:
    report = RecordingReport()
    ending = view("deleting", "2 requests in flight")
    await ask(lambda client: client.wait_until_gone("chat", PATIENCE_S, report), ending, GONE)
    assert report.lines == ["chat is deleting: 2 requests in flight"]
    with pytest.raises(SupervisorError, match=r"endpoint chat is not gone after 0\.01 s"):
        await ask(lambda client: client.wait_until_gone("chat", 0.01, report), view("deleting"))


@pytest.mark.parametrize("name", ["", "a/b"])
async def test_an_empty_name_leads_to_no_other_path(ask: Asking, name: str) -> None:
    with pytest.raises(UsageError, match="is no name for an endpoint"):
        await ask(lambda client: client.order(GET_ENDPOINT, name), view())


async def test_an_endpoint_is_as_it_is_answered(ask: Asking) -> None:
    assert await ask(lambda client: client.order(GET_ENDPOINT, "chat"), view()) == view()


def test_an_update_of_bounds_is_done_at_once() -> None:
    ordered = view()
    assert is_done(ordered, ordered)
    assert not is_done(ordered, msgspec.structs.replace(ordered, status=EndpointStatus("updating")))


def test_prefill_workers_are_counted_too() -> None:
    shown = progress_of(view("starting", wanted=2, ready=1, wanted_prefill=1))
    assert shown == "chat is starting: 1 of 2 workers ready, 0 of 1 prefill workers ready"
