"""What tasks there are for a model is told with its requests, and how many may be in flight."""

from __future__ import annotations

from typing import Any

import pytest

from components.frontend.batches.pacing import QueuedWork, room_for_tasks
from components.frontend.http.models import ModelEntry, ModelTable, Tasks
from dynamo_local.core.messages.presence import EngineInfo, Presence


class Model:
    """An application that nobody asks."""

    async def __call__(self, *_: Any) -> None:
        raise AssertionError


def worker(slots: int, state: Any = "ready") -> Presence:
    return Presence(f"w{slots}", "s", "aggregated", "", 1, state, engine=EngineInfo("vllm", "m", 9, 9, 9, slots))


@pytest.mark.parametrize(
    ("members", "room"),
    [
        ((), 8),
        ((worker(8, "starting"),), 8),
        ((worker(8),), 10),
        ((worker(4),), 6),
        ((worker(40), worker(8), worker(16, "starting")), 60),
        ((worker(1000),), 256),
    ],
)
def test_as_many_tasks_are_in_flight_as_ready_workers_run_and_a_margin(
    members: tuple[Presence, ...], room: int
) -> None:
    frontends = [Presence(name, "s", "frontend", "", 1, "ready") for name in "ab"]
    entry = ModelEntry(["chat"], lambda: None, app=Model())
    table = ModelTable([entry, ModelEntry(["other"], lambda: None)])
    entry.members = lambda: [*members, frontends[0]]
    assert room_for_tasks(table, "chat", 256) == room
    if any(each.state == "ready" for each in members) and room < 256:
        entry.members = lambda: [*members, *frontends]
        assert room_for_tasks(table, "chat", 256) == room / 2
    assert room_for_tasks(table, "nobody", 256) == 256


def test_each_model_has_what_is_queued_under_its_names() -> None:
    told: list[str] = []
    entries = [ModelEntry(names, lambda: None) for names in (["chat", "chat-lora"], ["code"])]
    for entry in entries:
        entry.on_change = lambda entry=entry: told.append(entry.names[0])  # type: ignore[misc]
    waiting = {"chat": Tasks(3, 1), "chat-lora": Tasks(2, 4), "gone": Tasks(9)}
    work = QueuedWork(ModelTable(entries), lambda: waiting)
    work.tell()
    work.tell()
    assert ([entry.tasks for entry in entries], told) == ([(5, 5), (0, 0)], ["chat"])
    waiting.clear()
    work.tell()
    assert ([entry.tasks for entry in entries], told) == ([(0, 0)] * 2, ["chat", "chat"])


def test_answers_that_wait_are_requests() -> None:
    entries = [ModelEntry([name], lambda: None) for name in ("chat", "code")]
    waiting = {"chat": 3, "gone": 9}
    work = QueuedWork(ModelTable(entries), dict, lambda: waiting)
    work.tell()
    assert [entry.demand for entry in entries] == [3, 0]
    waiting.clear()
    work.tell()
    assert [entry.demand for entry in entries] == [0, 0]
