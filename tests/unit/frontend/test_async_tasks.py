"""Asynchronous tasks as a frontend has them, with a model of the test's own: one result for each, whatever ends."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from components.frontend.async_tasks.calling import Calling
from components.frontend.async_tasks.keeper import TaskKeeper
from components.frontend.async_tasks.rest import TasksRest
from components.frontend.async_tasks.running import Surroundings
from components.frontend.http.callers import Caller
from components.frontend.http.gate import Administration, HttpGate
from components.frontend.http.models import ModelEntry, ModelTable, Tasks
from dynamo_local.core.async_tasks.callbacks import CallbackLimits
from dynamo_local.core.async_tasks.records import TaskLimits
from dynamo_local.core.http.asgi import Receive, Scope, Send
from dynamo_local.core.http.bounds.admission import AdmissionLimits
from dynamo_local.core.http.bounds.limits import NEVER
from dynamo_local.core.http.paths import TASKS
from dynamo_local.tasks import unless
from state.async_tasks.secret import callback_secret
from state.async_tasks.store import TaskStore
from state.paths import StatePaths
from tests.unit.frontend.asgi_driver import call, disconnected, scope
from tests.unit.frontend.kept_scene import until
from tests.unit.state.answers.disks import FullDisk

KEYS = ("alice", "bob")
GENERATES = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})


class Model:
    """Answers with its prompt, once `open` is set. `instead`: statuses that it answers first, by prompt. `never`:
    prompts that are refused as ones that can never be granted."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.asked: Counter[str] = Counter()
        self.order: list[str] = []
        self.paths: set[str] = set()
        self.priorities: set[bytes] = set()
        self.instead: dict[str, list[int]] = {}
        self.never: set[str] = set()
        self.now = self.most = 0

    async def __call__(self, asked: Scope, receive: Receive, send: Send) -> None:
        fields = json.loads((await receive())["body"])
        await unless(disconnected(receive), self._answer(fields, asked, send))

    async def _answer(self, fields: dict[str, Any], asked: Scope, send: Send) -> None:
        prompt = fields.get("prompt") or fields.get("input") or fields["messages"][0]["content"]
        self.asked[prompt] += 1
        self.order.append(prompt)
        self.paths.add(asked["path"])
        self.priorities.update(value for name, value in asked["headers"] if name == b"x-vllm-priority")
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.open.wait()
        finally:
            self.now -= 1
        status = self.instead[prompt].pop(0) if self.instead.get(prompt) else 429 if prompt in self.never else 200
        body = {"text": prompt} if status == 200 else {"error": {"message": f"no {prompt}", "code": status}}
        await send({"type": "http.response.start", "status": status, "headers": NEVER if prompt in self.never else []})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})


class Frontend:
    """What one frontend has of tasks, on a store that others may have as well."""

    def __init__(
        self,
        folder: Path,
        model: Model,
        disk: FullDisk | None = None,
        allow: str = "",
        callback_timeout_s: float = 5.0,
        **limits: Any,
    ) -> None:
        bounds, of_tasks = AdmissionLimits(hold_timeout_s=0), TaskLimits(**limits)
        self.wall_time = 1000.0
        self.unready: str | None = None
        self.paths = StatePaths(folder, "test")
        self.store = TaskStore(self.paths, of_tasks, disk or FullDisk())
        chat = ModelEntry(["chat"], lambda: self.unready, bounds, model, GENERATES)
        texts = ModelEntry(["texts"], lambda: None, bounds, model, frozenset({"/v1/embeddings"}))
        self.table = ModelTable([chat, texts])
        calling = Calling(CallbackLimits(allow, callback_timeout_s), lambda: callback_secret(self.paths), self.clock)
        rest = TasksRest(self.store, self.table, AdmissionLimits(max_body_bytes=3000), calling, self.clock)
        self.gate = HttpGate(
            model,
            limits=bounds,
            models=self.table,
            is_draining=lambda: False,
            api_keys=KEYS,
            administration=Administration(KEYS[1:]),
            stores={TASKS: rest},
        )
        self.callers: Callable[[str], Caller | None] = self.gate.caller_for
        self.pause_s: Callable[[int], float | None] = lambda calls: 0.0 if calls < 4 else None
        """Pauses of callbacks."""
        self.room = 256
        self.taken = 0
        around = Surroundings(
            self.gate.answer_kept,
            lambda owner: self.callers(owner),
            of_tasks,
            calling,
            self.clock,
            lambda calls: self.pause_s(calls),
            lambda _, most: min(self.room, most),
            self.note_taken,
        )
        self.keeper = rest.keeper = TaskKeeper(self.store, around)

    def clock(self) -> float:
        return self.wall_time

    def note_taken(self) -> None:
        self.taken = self.keeper.tasks().get("chat", Tasks()).taken

    async def ask(
        self, method: str, task: str = "", body: Any = None, key: str = "alice", query: str = ""
    ) -> dict[str, Any]:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        headers = [("Authorization", f"Bearer {key}")]
        asked = scope(f"{TASKS}{task}", method, headers, query_string=query.encode())
        answer = await call(self.gate, asked, [data])
        return dict(json.loads(answer.body)) | {"http": answer.status}

    async def order(self, prompt: str, key: str = "alice", **more: Any) -> str:
        """Order a task; returns its id."""
        body = {"args": {"prompt": prompt}, **more}
        made = await self.ask("POST", "", body, key, "model_endpoint_id=chat")
        assert made["http"] == 200, made
        return str(made["task_id"])

    async def show(self, task: str, key: str = "alice") -> dict[str, Any]:
        return await self.ask("GET", f"/{task}", key=key)

    async def ended(self, task: str, key: str = "alice") -> dict[str, Any]:
        async with asyncio.timeout(30):
            while (found := await self.show(task, key))["status"] in ("PENDING", "STARTED"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return found

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Frontend]:
        task = asyncio.create_task(self.keeper.run())
        try:
            await until(lambda: self.keeper.why_closed != "the frontend is starting")
            yield self
        finally:
            task.cancel()
            await asyncio.wait({task})


async def test_a_task_has_the_answer_of_its_model(tmp_path: Path) -> None:
    model = Model()
    async with Frontend(tmp_path, model).running() as frontend:
        task = await frontend.order("one")
        assert await frontend.ended(task) == {
            "task_id": task,
            "status": "SUCCESS",
            "result": {"text": "one"},
            "traceback": None,
            "status_code": 200,
            "http": 200,
        }
        assert (model.priorities, model.paths) == ({b"100"}, {"/v1/completions"})
        assert (await frontend.show(task, "bob"))["http"] == 404
        assert (await frontend.ask("DELETE", f"/{task}", key="bob"))["http"] == 404
        assert await frontend.ask("DELETE", f"/{task}") == {"task_id": task, "deleted": True, "http": 200}
        assert (await frontend.show(task))["http"] == 404


@pytest.mark.parametrize(
    ("endpoint", "args", "path"),
    [
        ("chat", {"messages": [{"role": "user", "content": "x"}]}, "/v1/chat/completions"),
        ("chat", {"input": "x"}, "/v1/responses"),
        ("texts", {"input": "x"}, "/v1/embeddings"),
    ],
)
async def test_a_path_is_chosen_by_the_arguments(
    tmp_path: Path, endpoint: str, args: dict[str, Any], path: str
) -> None:
    model = Model()
    async with Frontend(tmp_path, model).running() as frontend:
        made = await frontend.ask("POST", "", {"args": args}, query=f"model_endpoint_id={endpoint}")
        await frontend.ended(made["task_id"])
        assert model.paths == {path}


@pytest.mark.parametrize(
    ("body", "query", "status", "why"),
    [
        (b"{", "", 400, "cannot be read"),
        (b"[]", "", 400, "cannot be read"),
        ({}, "", 400, "args"),
        ({"args": {"prompt": "x"}}, "", 400, "model_endpoint_id"),
        ({"args": {"prompt": "x"}}, "model_endpoint_id=nobody", 404, "nobody"),
        ({"args": {"prompt": "x"}}, "endpoint=chat", 400, "endpoint"),
        ({"args": {"prompt": "x", "model": "texts"}}, "model_endpoint_id=chat", 400, "args.model"),
        ({"args": {"prompt": "x"}, "speed": 1}, "model_endpoint_id=chat", 400, "speed"),
        ({"args": {"prompt": "x"}, "url": "s3://x"}, "model_endpoint_id=chat", 400, "url"),
        ({"args": {"prompt": "x"}, "cloudpickle": "x"}, "model_endpoint_id=chat", 400, "cloudpickle"),
        ({"args": {"prompt": "x"}, "return_pickled": True}, "model_endpoint_id=chat", 400, "return_pickled"),
        ({"args": {"prompt": "x", "stream": True}}, "model_endpoint_id=chat", 400, "args.stream"),
        ({"args": {"prompt": "x", "stream": "on"}}, "model_endpoint_id=chat", 400, "args.stream"),
        ({"args": {"input": "x", "store": 1}}, "model_endpoint_id=chat", 400, "args.store"),
        ({"args": {"text": "x"}}, "model_endpoint_id=chat", 400, "args"),
        ({"args": {"prompt": "x", "n": 99}}, "model_endpoint_id=chat", 400, "n "),
        ({"args": {"prompt": "x", "priority": "high"}}, "model_endpoint_id=chat", 400, "priority"),
        ({"args": {"prompt": "x"}, "destination_path": "/v1/keys"}, "model_endpoint_id=chat", 400, "destination_path"),
        ({"args": {"prompt": "x"}, "destination_path": "/rerank"}, "model_endpoint_id=chat", 404, "/rerank"),
        ({"args": {"prompt": "x" * 4000}}, "model_endpoint_id=chat", 413, "3000 bytes"),
    ],
)
async def test_what_is_wrong_is_named(tmp_path: Path, body: Any, query: str, status: int, why: str) -> None:
    async with Frontend(tmp_path, Model()).running() as frontend:
        refused = await frontend.ask("POST", "", body, query=query)
        assert refused["http"] == status
        assert why in refused["error"]["message"]
        assert frontend.store.all() == []


async def test_a_refusal_of_the_model_is_the_failure(tmp_path: Path) -> None:
    model = Model()
    model.instead = {"bad": [400], "busy": [429, 503, 500], "broken": [500] * 3}
    async with Frontend(tmp_path, model).running() as frontend:
        tasks = {prompt: await frontend.order(prompt) for prompt in ("bad", "busy", "broken")}
        bad, busy, broken = [await frontend.ended(task) for task in tasks.values()]
    assert (bad["status"], bad["status_code"], bad["traceback"], bad["result"]) == ("FAILURE", 400, "no bad", None)
    assert (busy["status"], model.asked["busy"]) == ("SUCCESS", 4)
    assert (broken["status_code"], model.asked["broken"]) == (500, 3)


async def test_what_can_never_be_granted_fails_at_once(tmp_path: Path) -> None:
    model = Model()
    model.never = {"large"}
    async with Frontend(tmp_path, model).running() as frontend:
        found = await frontend.ended(await frontend.order("large"))
    assert (found["status"], found["status_code"], found["traceback"]) == ("FAILURE", 429, "no large")
    assert model.asked["large"] == 1


async def test_each_task_has_one_result_whatever_frontends_end(tmp_path: Path) -> None:
    """Two frontends on one store; one ends in the middle, the other one goes on, and what had a result is not asked
    again."""
    model = Model()
    one, two = Frontend(tmp_path, model, max_task_requests=3), Frontend(tmp_path, model, max_task_requests=3)
    async with one.running():
        first = [await one.order(f"early {n}") for n in range(5)]
        for task in first:
            await one.ended(task)
        model.open.clear()
        late = [await one.order(f"late {n}") for n in range(9)]
        await until(lambda: model.now == 3)
        assert [(await one.show(task))["status"] for task in late] == ["STARTED"] * 3 + ["PENDING"] * 6
        assert one.keeper.tasks() == {"chat": (6, 3)}
    async with two.running():
        await until(lambda: model.now == 3)
        model.open.set()
        found = [await two.ended(task) for task in late]
        assert [each["result"]["text"] for each in found] == [f"late {n}" for n in range(9)]
        await until(lambda: two.keeper.tasks() == {})
    assert {model.asked[f"early {n}"] for n in range(5)} == {1}
    assert model.most <= 3


async def test_owners_take_turns(tmp_path: Path) -> None:
    model = Model()
    model.open.clear()
    async with Frontend(tmp_path, model, max_task_requests=1).running() as frontend:
        tasks = [await frontend.order(f"alice {n}") for n in range(3)]
        last = await frontend.order("bob 0", "bob")
        model.open.set()
        for task in tasks:
            await frontend.ended(task)
        await frontend.ended(last, "bob")
    assert model.order == ["alice 0", "alice 1", "bob 0", "alice 2"]


async def test_a_task_that_is_refused_gives_its_place_to_others_and_is_demand(tmp_path: Path) -> None:
    model = Model()
    model.instead = {"alice": [429] * 99, "bob": [503]}
    async with Frontend(tmp_path, model, max_task_requests=1).running() as frontend:
        refused = await frontend.order("alice")
        await until(lambda: model.asked["alice"] == 1)
        await frontend.ended(await frontend.order("bob", "bob"), "bob")
        await until(lambda: frontend.keeper.tasks() == {"chat": (1, 0)})
        model.instead = {}
        assert (await frontend.ended(refused))["status"] == "SUCCESS"


async def test_a_task_that_is_deleted_is_asked_for_no_more(tmp_path: Path) -> None:
    model = Model()
    model.open.clear()
    async with Frontend(tmp_path, model, max_task_requests=1).running() as frontend:
        running, waiting = await frontend.order("running"), await frontend.order("waiting")
        await until(lambda: model.now == 1)
        assert (await frontend.ask("DELETE", f"/{waiting}"))["http"] == 200
        assert (await frontend.ask("DELETE", f"/{running}"))["http"] == 200
        assert model.now == 0
        assert frontend.store.all() == []
    assert model.asked == {"running": 1}


async def test_bounds_and_expiry(tmp_path: Path) -> None:
    async with Frontend(tmp_path, Model(), max_tasks=2, task_retention_s=50).running() as frontend:
        tasks = [await frontend.order("x"), await frontend.order("y")]
        refused = await frontend.ask("POST", "", {"args": {"prompt": "z"}}, query="model_endpoint_id=chat")
        assert (refused["http"], "max-tasks" in refused["error"]["message"]) == (507, True)
        await frontend.order("z", "bob")
        for task in tasks:
            await frontend.ended(task)
        await until(lambda: not frontend.store.look().running)
        modified = max(path.stat().st_mtime for path in frontend.paths.tasks_dir.rglob("*.ended"))
        assert frontend.store.remove_expired(modified + 49) == 0
        assert frontend.store.remove_expired(modified + 51) == 3


async def test_a_full_disk_keeps_what_was_confirmed(tmp_path: Path) -> None:
    disk, model = FullDisk(), Model()
    async with Frontend(tmp_path, model, disk).running() as frontend:
        model.open.clear()
        task = await frontend.order("kept")
        await until(lambda: model.now == 1)
        disk.is_full = True
        refused = await frontend.ask("POST", "", {"args": {"prompt": "x"}}, query="model_endpoint_id=chat")
        assert refused["http"] == 507
        model.open.set()
        await until(lambda: model.now == 0)
        disk.is_full = False
    async with Frontend(tmp_path, model, disk).running() as frontend:
        assert (await frontend.ended(task))["result"] == {"text": "kept"}


async def test_a_damaged_task_is_undefined_and_others_go_on(tmp_path: Path) -> None:
    model = Model()
    model.open.clear()
    async with Frontend(tmp_path, model).running() as frontend:
        broken, whole = await frontend.order("broken"), await frontend.order("whole")
    (path,) = frontend.paths.tasks_dir.rglob(f"{broken}.running")
    path.write_bytes(b"nonsense")
    model.open.set()
    async with Frontend(tmp_path, model).running() as frontend:
        assert (await frontend.ended(whole))["status"] == "SUCCESS"
        assert (await frontend.show(broken))["status"] == "UNDEFINED"
        await until(lambda: not frontend.store.look().running)


async def test_a_key_that_is_gone_fails_its_tasks(tmp_path: Path) -> None:
    model = Model()
    model.instead = {"x": [503] * 99}
    async with Frontend(tmp_path, model).running() as frontend:
        task = await frontend.order("x")
        await until(lambda: model.asked["x"] > 0)
        frontend.callers = lambda _: None
        found = await frontend.ended(task)
        assert (found["status"], found["status_code"]) == ("FAILURE", 401)
        assert "revoked" in found["traceback"]


async def test_a_later_releases_store_is_left_alone(tmp_path: Path) -> None:
    async with Frontend(tmp_path, Model()).running() as frontend:
        await frontend.ended(await frontend.order("x"))
    (frontend.paths.tasks_dir / "store.json").write_text('{"schema_version": 99}')
    async with Frontend(tmp_path, Model()).running() as later:
        refused = await later.ask("POST", "", {"args": {"prompt": "z"}}, query="model_endpoint_id=chat")
        assert (refused["http"], "version 99" in refused["error"]["message"]) == (503, True)


async def test_no_more_are_in_flight_than_there_is_room_for(tmp_path: Path) -> None:
    model = Model()
    model.open.clear()
    async with Frontend(tmp_path, model).running() as frontend:
        frontend.room = 2
        tasks = [await frontend.order(f"{n}") for n in range(6)]
        await until(lambda: model.now == 2)
        assert (frontend.keeper.tasks(), frontend.taken) == ({"chat": (4, 2)}, 2)
        frontend.room = 5
        await until(lambda: model.now == 5)
        assert (frontend.keeper.tasks(), frontend.taken) == ({"chat": (1, 5)}, 5)
        model.open.set()
        for task in tasks:
            await frontend.ended(task)


async def test_results_take_up_room_as_well(tmp_path: Path) -> None:
    async with Frontend(tmp_path, Model(), max_task_bytes=3000).running() as frontend:
        tasks = [await frontend.order(f"{n}" * 700) for n in range(2)]
        found = [await frontend.ended(task) for task in tasks]
        assert sorted(each["status_code"] for each in found) == [200, 507]
        assert any("max-task-bytes" in (each["traceback"] or "") for each in found)
        other = await frontend.order("x" * 700, "bob")
        assert (await frontend.ended(other, "bob"))["status_code"] == 200
