"""What becomes of orders about endpoints, as their sender learns it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dynamo_local.core.endpoints.checks import read_spec
from dynamo_local.core.endpoints.refusals import error_of, refusal_of
from dynamo_local.core.errors import (
    BusError,
    DynamoError,
    EndpointAbsentError,
    EndpointConflictError,
    StateError,
    SupervisorError,
    UsageError,
)
from dynamo_local.core.messages.endpoints import (
    EndpointRefusal,
    EndpointsAnswer,
    EndpointState,
    EndpointStatus,
    EndpointView,
    ListEndpoints,
)
from dynamo_local.supervisor.admin.orders.endpoints import EndpointClient, is_done, progress_of
from tests.unit.supervisor.recording import RecordingReport


def view(state: EndpointState = "ready", reason: str = "", model: str = "m", **counts: int) -> EndpointView:
    return EndpointView(read_spec({"name": "chat", "model": model}), EndpointStatus(state, reason, **counts), 0.0, 0.0)


GONE = EndpointRefusal(404, "there is no endpoint 'chat'", "there are: none")


class Answers:
    """A bus whose server gives these answers in turn, and the last one again and again."""

    def __init__(self, *answers: EndpointsAnswer | BusError) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[str, Any]] = []

    async def ask(self, subject: str, message: Any, reply: type, *, timeout_s: float) -> Any:
        self.asked.append((subject, message))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, BusError):
            raise answer
        return answer


def client(*answers: EndpointView | EndpointRefusal) -> EndpointClient:
    told = [
        EndpointsAnswer((one,)) if isinstance(one, EndpointView) else EndpointsAnswer(refused=one) for one in answers
    ]
    return EndpointClient(Answers(*told), "dynamo", look_every_s=0)  # type: ignore[arg-type]  # all that it uses of a bus


async def test_progress_is_told_until_it_is_ready() -> None:
    report = RecordingReport()
    steps = [view("fetching", "model m"), view("starting", wanted=2), view("starting", wanted=2, ready=1), view()]
    done = await client(*steps).wait_until_ready(view("waiting"), 60, report)
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
async def test_what_never_becomes_ready_is_an_error(end: Any, said: str) -> None:
    with pytest.raises(DynamoError, match=said):
        await client(view("starting"), end).wait_until_ready(view("starting"), 60, RecordingReport())


async def test_what_takes_too_long_stays_ordered() -> None:
    with pytest.raises(SupervisorError, match=r"not ready after 0\.01 s: chat is waiting: no device; it stays ordered"):
        await client(view("waiting", "no device")).wait_until_ready(view("starting"), 0.01, RecordingReport())


async def test_deletion_is_done_when_it_is_gone() -> None:
    report = RecordingReport()
    await client(view("deleting", "2 requests in flight"), GONE).wait_until_gone("chat", 60, report)
    assert report.lines == ["chat is deleting: 2 requests in flight"]
    with pytest.raises(SupervisorError, match=r"endpoint chat is not gone after 0\.01 s"):
        await client(view("deleting")).wait_until_gone("chat", 0.01, report)


async def test_a_server_that_does_not_answer_is_said() -> None:
    bus: Any = Answers(BusError("no answer"))
    with pytest.raises(SupervisorError, match="namespace dynamo does not answer about endpoints; it may be starting"):
        await EndpointClient(bus, "dynamo").order(ListEndpoints("chat"))
    assert bus.asked == [("dyn.dynamo.endpoints", ListEndpoints("chat"))]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UsageError("a", "b"), 400),
        (EndpointAbsentError("a", "b"), 404),
        (EndpointConflictError("a", "b"), 409),
        (StateError("a", "b"), 503),
        (SupervisorError("a"), 503),
    ],
)
def test_errors_survive_the_bus(error: DynamoError, status: int) -> None:
    refusal = refusal_of(error)
    assert refusal.status == status
    arrived = error_of(refusal)
    assert (str(arrived), arrived.exit_code) == (str(error), error.exit_code)


def test_an_update_of_bounds_is_done_at_once() -> None:
    ordered = view()
    assert is_done(ordered, ordered)
    assert not is_done(ordered, msgspec.structs.replace(ordered, status=EndpointStatus("updating")))


def test_prefill_workers_are_counted_too() -> None:
    shown = progress_of(view("starting", wanted=2, ready=1, wanted_prefill=1))
    assert shown == "chat is starting: 1 of 2 workers ready, 0 of 1 prefill workers ready"
