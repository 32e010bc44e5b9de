"""What becomes of orders about endpoints, as their sender learns it."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from dynamo_local.control.operations import GET_ENDPOINT, Operation
from dynamo_local.core.endpoints.checks import read_spec
from dynamo_local.core.errors import DynamoError, EndpointAbsentError, SupervisorError, UsageError
from dynamo_local.core.messages.endpoints import EndpointState, EndpointStatus, EndpointView, shown
from dynamo_local.supervisor.admin.orders.endpoints import EndpointClient, is_done, progress_of
from tests.unit.supervisor.recording import RecordingReport


def view(state: EndpointState = "ready", reason: str = "", model: str = "m", **counts: int) -> EndpointView:
    return EndpointView(read_spec({"name": "chat", "model": model}), EndpointStatus(state, reason, **counts), 0.0, 0.0)


GONE = EndpointAbsentError("there is no endpoint 'chat'", "there are: none")


class Answers:
    """A server that gives these answers in turn, and the last one again and again."""

    def __init__(self, *answers: EndpointView | DynamoError) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[Operation, dict[str, str]]] = []

    def do(self, operation: Operation, fields: Any = None, **names: str) -> Any:
        self.asked.append((operation, names))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, DynamoError):
            raise answer
        return msgspec.to_builtins(shown(answer))


def client(*answers: EndpointView | DynamoError) -> EndpointClient:
    return EndpointClient(cast("Any", Answers(*answers)), look_every_s=0)


def test_progress_is_told_until_it_is_ready() -> None:
    report = RecordingReport()
    steps = [view("fetching", "model m"), view("starting", wanted=2), view("starting", wanted=2, ready=1), view()]
    done = client(*steps).wait_until_ready(view("waiting"), 60, report)
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
def test_what_never_becomes_ready_is_an_error(end: Any, said: str) -> None:
    with pytest.raises(DynamoError, match=said):
        client(view("starting"), end).wait_until_ready(view("starting"), 60, RecordingReport())


def test_what_takes_too_long_stays_ordered() -> None:
    with pytest.raises(SupervisorError, match=r"not ready after 0\.01 s: chat is waiting: no device; it stays ordered"):
        client(view("waiting", "no device")).wait_until_ready(view("starting"), 0.01, RecordingReport())


def test_deletion_is_done_when_it_is_gone() -> None:
    report = RecordingReport()
    client(view("deleting", "2 requests in flight"), GONE).wait_until_gone("chat", 60, report)
    assert report.lines == ["chat is deleting: 2 requests in flight"]
    with pytest.raises(SupervisorError, match=r"endpoint chat is not gone after 0\.01 s"):
        client(view("deleting")).wait_until_gone("chat", 0.01, report)


def test_an_empty_name_leads_to_no_other_path() -> None:
    server = Answers(view())
    for name in ("", "a/b"):
        with pytest.raises(UsageError, match="is no name for an endpoint"):
            EndpointClient(cast("Any", server)).order(GET_ENDPOINT, name)
    assert server.asked == []
    assert EndpointClient(cast("Any", server)).order(GET_ENDPOINT, "chat") == view()
    assert server.asked == [(GET_ENDPOINT, {"name": "chat"})]


def test_an_update_of_bounds_is_done_at_once() -> None:
    ordered = view()
    assert is_done(ordered, ordered)
    assert not is_done(ordered, msgspec.structs.replace(ordered, status=EndpointStatus("updating")))


def test_prefill_workers_are_counted_too() -> None:
    shown = progress_of(view("starting", wanted=2, ready=1, wanted_prefill=1))
    assert shown == "chat is starting: 1 of 2 workers ready, 0 of 1 prefill workers ready"
