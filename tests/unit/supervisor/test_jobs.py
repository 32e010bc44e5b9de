"""What the server tells of tasks and batches of all owners, and how it cancels them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.control.errors import NOT_FOUND, status_of
from dynamo_local.control.operations import CANCEL_JOB, GET_JOB, LIST_JOBS, Call, Operation
from dynamo_local.core.async_tasks import records
from dynamo_local.core.async_tasks.records import TaskHead, TaskResult
from dynamo_local.core.errors import ItemAbsentError, OrderError
from dynamo_local.core.stored.batches import BatchOrder, BatchState, LineError
from dynamo_local.supervisor.jobs import Jobs
from state.async_tasks.store import TaskStore, new_task_id
from state.paths import StatePaths
from state.stored.batches import BatchStore, new_batch_id
from state.stored.files import FileDescription, FileStore

NOW = 1000.0


class Scene:
    """The stores of a namespace, and its jobs."""

    def __init__(self, paths: StatePaths) -> None:
        files = FileStore(paths)
        self.tasks, self.batches = TaskStore(paths), BatchStore(paths, files)
        self._files = files
        self._jobs = Jobs(paths, wall_clock=lambda: NOW)

    def task(self, owner: str, at: float, callback_url: str = "") -> str:
        name = new_task_id(at)
        head = TaskHead(
            task=name, model="chat", path="/v1/completions", priority=5, created_at=int(at), callback_url=callback_url
        )
        self.tasks.create(owner, head, b'{"prompt": "private"}')
        return name

    def batch(self, owner: str, at: int, state: BatchState | None = None) -> str:
        new = self._files.begin(owner)
        file = self._files.keep(new, FileDescription(owner, "in.jsonl", "batch", 1000), NOW)
        order = BatchOrder(new_batch_id(), owner, "/v1/completions", file.id, "24h", at, at + 9, 1000)
        self.batches.create(order, file)
        if state is not None:
            taken = self.batches.take(order.id)
            assert taken is not None
            taken.write(state)
            taken.release()
        return order.id

    def answer(self, task: str, result: TaskResult, *calls: records.Call) -> None:
        taken = self.tasks.take(self.tasks.owner_of(task), task)
        assert taken is not None
        taken.record(result)
        for call in calls:
            taken.note_call(call)
        if not calls or calls[-1].is_last:
            taken.end()
        taken.release()

    async def do(self, operation: Operation, job: str = "", **query: str) -> Any:
        return await self._jobs.handlers[operation](Call({"job": job}, query))

    async def names(self, **query: str) -> list[str]:
        listed = (await self.do(LIST_JOBS, **query))["data"]
        return [each["task_id"] if "task_id" in each else each["id"] for each in listed]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(StatePaths(tmp_path, "n"))


def test_nothing_is_listed_where_nothing_was_ordered(scene: Scene, tmp_path: Path) -> None:
    assert asyncio.run(scene.do(LIST_JOBS, ended="true")) == {"object": "list", "data": []}
    assert not list(tmp_path.iterdir()), "a look makes no store"


async def test_jobs_are_listed_by_kind_the_newest_first_and_ended_ones_if_wanted(scene: Scene) -> None:
    old, new, done = (scene.task(owner, at) for owner, at in (("a#1", 1.0), ("", 2.0), ("b#1", 3.0)))
    scene.answer(done, TaskResult(200, b"{}", 4))
    ended, under_way = scene.batch("a#1", 1, BatchState("completed", completed_at=2)), scene.batch("b#1", 2)
    assert await scene.names() == [new, old, under_way]
    assert await scene.names(ended="true") == [done, new, old, under_way, ended]
    assert await scene.names(kind="task", ended="true") == [done, new, old]
    assert await scene.names(kind="batch", ended="true") == [under_way, ended]
    for query in ({"kind": "job"}, {"ended": "yes"}):
        with pytest.raises(OrderError):
            await scene.do(LIST_JOBS, **query)


async def test_a_task_is_told_without_what_is_its_owners(scene: Scene) -> None:
    name = scene.task("a#1", 1.0, "http://receiver.example/secret?x=1")
    scene.answer(name, TaskResult(200, b'"private"', 2), records.Call("status 503", False, False, 3))
    assert await scene.do(GET_JOB, name) == {
        "task_id": name,
        "status": "SUCCESS",
        "owner": "a",
        "model": "chat",
        "path": "/v1/completions",
        "priority": 5,
        "created_at": 1,
        "ended_at": 2,
        "callback": "PENDING",
        "callback_calls": 1,
        "status_code": 200,
        "callback_receiver": "http://receiver.example:80",
        "callback_last": {"outcome": "status 503", "at": 3},
        "answer_bytes": 9,
        "has_ended": False,
    }


async def test_a_task_that_cannot_be_read_is_told_as_such(scene: Scene, tmp_path: Path) -> None:
    name = scene.task("a#1", 1.0)
    (tmp_path / "n.tasks" / "of-a#1" / f"{name}.running").write_bytes(b"nonsense")
    told = {"task_id": name, "status": "UNDEFINED", "owner": "a", "has_ended": False}
    assert await scene.do(GET_JOB, name) == told
    assert (await scene.do(LIST_JOBS))["data"] == [told]


async def test_a_batch_is_told_as_its_clients_see_it_with_its_owner(scene: Scene) -> None:
    state = BatchState("failed", total=2, failed_at=7, errors=(LineError("bad", "line 1: bad", None, 1),))
    found = await scene.do(GET_JOB, scene.batch("", 1, state))
    assert (found["object"], found["status"], found["owner"], found["failed_at"]) == ("batch", "failed", "-", 7)
    assert found["errors"]["data"] == [{"code": "bad", "message": "line 1: bad", "param": None, "line": 1}]


async def test_a_job_is_cancelled_once_and_one_that_has_ended_stays_as_it_is(scene: Scene) -> None:
    task, done = scene.task("a#1", 1.0), scene.task("a#1", 2.0)
    scene.answer(done, TaskResult(200, b"{}", 4))
    batch, completed = scene.batch("", 1), scene.batch("", 2, BatchState("completed", completed_at=2))
    for _ in range(2):
        assert (await scene.do(CANCEL_JOB, task))["status"] == "PENDING"
        assert (await scene.do(CANCEL_JOB, done))["status"] == "SUCCESS"
        cancelling = await scene.do(CANCEL_JOB, batch)
        assert (cancelling["status"], cancelling["cancelling_at"]) == ("cancelling", int(NOW))
        assert (await scene.do(CANCEL_JOB, completed))["status"] == "completed"
    assert scene.tasks.look().cancelled == {task}


@pytest.mark.parametrize("operation", [GET_JOB, CANCEL_JOB])
@pytest.mark.parametrize("job", ["task_", "task_../x", f"task_{'0' * 32}", "batch_", f"batch_{'0' * 24}", "order.json"])
async def test_what_is_no_job_is_not_found(scene: Scene, operation: Operation, job: str) -> None:
    with pytest.raises(ItemAbsentError, match="no such") as raised:
        await scene.do(operation, job)
    assert status_of(raised.value) == NOT_FOUND
