"""Batches as a frontend runs them, with a model of the test's own: one result for each line, whatever ends."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from components.frontend.batches.pacing import Pacer
from components.frontend.batches.run import AT_ONCE, BatchKeeper, Surroundings
from components.frontend.http.callers import ANYBODY, Caller
from components.frontend.http.gate import HttpGate
from components.frontend.http.models import ModelEntry, ModelTable
from components.frontend.stored.rest import BatchesRest, FilesRest
from components.frontend.stored.upload import Uploads
from dynamo_local.core.http.asgi import Receive, Scope, Send
from dynamo_local.core.http.bounds.admission import AdmissionLimits
from dynamo_local.core.http.paths import BATCHES, FILES
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.stored.batches import BatchLimits
from dynamo_local.tasks import unless
from state.paths import StatePaths
from state.stored.batches import BatchStore
from state.stored.files import FileDescription, FileStore
from tests.integration.fleet_of_fakes import until
from tests.unit.frontend.asgi_driver import call, disconnected, scope

LIMITS = BatchLimits(max_batch_lines=50, max_batches=3, max_batch_requests=8)
USAGE = {"prompt_tokens": 2, "completion_tokens": 1}
WORKER = Presence("test_VllmWorker_0", "VllmWorker", "aggregated", "w", 1, "ready")


class Model:
    """Answers with its prompt, once `open` is set. `instead`: statuses that it answers first, by prompt. `stops_at`:
    the prompt that closes it."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.asked: Counter[str] = Counter()
        self.priorities: set[bytes] = set()
        self.instead: dict[str, list[int]] = {}
        self.stops_at = ""

    async def __call__(self, asked: Scope, receive: Receive, send: Send) -> None:
        prompt = json.loads((await receive())["body"])["prompt"]
        await unless(disconnected(receive), self._answer(prompt, asked, send))

    async def _answer(self, prompt: str, asked: Scope, send: Send) -> None:
        self.asked[prompt] += 1
        self.priorities.update(value for name, value in asked["headers"] if name == b"x-vllm-priority")
        if prompt == self.stops_at:
            self.open.clear()
        await self.open.wait()
        if prompt == "raises":
            raise RuntimeError("the application is broken")
        status = self.instead[prompt].pop(0) if self.instead.get(prompt) else 200
        body = json.dumps({"text": prompt, "usage": USAGE}, ensure_ascii=False).encode()
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})


class Pauses:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, int]] = []

    def keep(self, running: int, priority: int) -> None:
        self.kept.append((running, priority))

    def end(self) -> None:
        self.kept.clear()


class Frontend:
    """What one frontend has of batches, on stores that others may have as well."""

    def __init__(self, folder: Path, model: Model, limits: BatchLimits = LIMITS) -> None:
        self.now = 1000.0
        self.callers: Callable[[str], Caller | None] = lambda _: ANYBODY
        self.ready = True
        paths = StatePaths(folder, "test")
        self.files = FileStore(paths)
        self.store = BatchStore(paths, self.files, limits)
        bounds = AdmissionLimits(hold_timeout_s=0)
        self.attempts = 0
        """Lines that were sent to the gate."""
        self.entry = ModelEntry(["m", "n"], lambda: None if self.ready else "asleep", bounds, model)
        self.entry.members = lambda: [WORKER]
        self.table = table = ModelTable([self.entry, ModelEntry(["other"], lambda: None, bounds, model)])
        rest = FilesRest(self.files, Uploads(self.files, 10**6, 10.0, self.clock), self.clock)
        batches = BatchesRest(self.store, self.files, bounds, self.clock)
        self.gate = HttpGate(
            model,
            limits=bounds,
            models=table,
            is_draining=lambda: False,
            stores={FILES: rest, BATCHES: batches},
        )
        around = Surroundings(
            answer=self.answer_own,
            models=table,
            pacer=Pacer(table, limits.max_batch_requests),
            files=self.files,
            limits=limits,
            max_body_bytes=10_000,
            caller=lambda owner: self.callers(owner),
            wall_clock=self.clock,
        )
        self.keeper = BatchKeeper(self.store, around)

    async def answer_own(self, asked: Scope, receive: Receive, send: Send) -> None:
        """As the gate does."""
        self.attempts += 1
        await self.gate.answer_own(asked, receive, send)

    def clock(self) -> float:
        return self.now

    async def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        data = b"" if body is None else json.dumps(body).encode()
        answer = await call(self.gate, scope(path, method, query_string=b""), [data])
        found: dict[str, Any] = json.loads(answer.body)
        return found | {"http": answer.status}

    def upload(self, text: bytes) -> str:
        described = FileDescription("", "in.jsonl", "batch", 3600)
        new = self.files.begin("")
        new.write(text)
        return self.files.keep(new, described, self.now).id

    async def order(self, *lines: dict[str, Any], **changes: Any) -> str:
        """Order a batch of these lines; returns its id."""
        text = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        made = await self.ask("POST", "/v1/batches", ordered(self.upload(text)) | changes)
        assert made["http"] == 200, made
        return str(made["id"])

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.keeper.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def until(self, batch_id: str, *statuses: str) -> dict[str, Any]:
        """Wait until the batch is so."""
        async with asyncio.timeout(60):
            while True:
                batch = await self.ask("GET", f"/v1/batches/{batch_id}")
                if batch["status"] in statuses:
                    break
                await asyncio.sleep(0.01)
        return batch

    async def results(self, file_id: str | None) -> dict[str, Any]:
        """Results in a file of an output, by custom id."""
        if file_id is None:
            return {}
        answer = await call(self.gate, scope(f"/v1/files/{file_id}/content", "GET"))
        lines = [json.loads(line) for line in answer.body.splitlines()]
        assert len({line["custom_id"] for line in lines}) == len(lines)
        return {line["custom_id"]: line for line in lines}


def ordered(file_id: str) -> dict[str, Any]:
    return {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "1h"}


def line(prompt: str, **changes: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": 1}
    return {"custom_id": f"id {prompt}", "method": "POST", "url": "/v1/completions", "body": body} | changes


def long_line(size: int) -> bytes:
    """A line of so many bytes."""
    return json.dumps(line("x", filler="x" * (size - len(json.dumps(line("x", filler="")))))).encode()


def lines(number: int) -> list[dict[str, Any]]:
    return [line(str(n)) for n in range(number)]


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def frontend(tmp_path: Path, model: Model) -> Frontend:
    return Frontend(tmp_path, model)


async def test_a_life_of_a_batch(frontend: Frontend, model: Model) -> None:
    model.instead = {"3": [400], "4": [503, 429], "5": [500, 500, 500, 500], "6": [500]}
    batch_id = await frontend.order(*lines(20), line("raises"), metadata={"a": "b"})
    # The input may go: the batch has it.
    assert (await frontend.ask("GET", f"/v1/batches/{batch_id}"))["status"] == "validating"
    for file in (await frontend.ask("GET", "/v1/files"))["data"]:
        await frontend.ask("DELETE", f"/v1/files/{file['id']}")
    async with frontend.running():
        batch = await frontend.until(batch_id, "completed")
    assert batch["request_counts"] == {"total": 21, "completed": 18, "failed": 3}
    assert batch["usage"]["total_tokens"] == 18 * 3
    assert (batch["metadata"], batch["errors"], batch["completed_at"]) == ({"a": "b"}, None, 1000)
    output, errors = await frontend.results(batch["output_file_id"]), await frontend.results(batch["error_file_id"])
    assert output.keys() == {f"id {n}" for n in range(20) if n not in (3, 5)}
    assert output["id 7"]["response"]["body"] == {"text": "7", "usage": USAGE}
    assert output["id 7"]["error"] is None
    assert {name: each["response"]["status_code"] for name, each in errors.items()} == {
        "id 3": 400,
        "id 5": 500,
        "id raises": 500,
    }
    assert model.priorities == {b"1000"}
    assert (model.asked["4"], model.asked["5"], model.asked["6"]) == (3, 3, 2)
    assert [each["id"] for each in (await frontend.ask("GET", "/v1/batches"))["data"]] == [batch_id]


@pytest.mark.parametrize(
    ("text", "code", "number", "param"),
    [
        (b"", "empty_file", None, None),
        (b"\n \n", "empty_file", None, None),
        (b"no json\n", "invalid_json_line", 1, None),
        *(
            (f"{json.dumps(line('x'))}\n{json.dumps(line('y'))}\n".encode(encoding), "invalid_encoding", 1, None)
            for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32")
        ),
        (b"".join(json.dumps(each).encode() + b"\n" for each in lines(51)), "too_many_lines", 51, None),
        (long_line(10_001), "invalid_request", 1, None),
        (long_line(10_001) + b"\r\n", "invalid_request", 1, None),
        (long_line(10_000) + b"\r\r\n", "invalid_request", 1, None),
        (json.dumps(line("x", body={"model": "x", "prompt": "x"})).encode(), "model_not_found", 1, "body.model"),
        (json.dumps(line("x", body={"model": "m", "n": 99})).encode(), "invalid_request", 1, "body.n"),
        (b'\n{"custom_id":"a","method":"POST","url":"/v1/x","body":{}}', "invalid_url", 2, "url"),
    ],
)
async def test_a_wrong_input_fails_the_batch_and_tells_the_line(
    frontend: Frontend, model: Model, text: bytes, code: str, number: int | None, param: str | None
) -> None:
    made = await frontend.ask("POST", "/v1/batches", ordered(frontend.upload(text)))
    async with frontend.running():
        batch = await frontend.until(made["id"], "failed")
    (error,) = batch["errors"]["data"]
    assert (error["code"], error["line"], error["param"]) == (code, number, param)
    assert not model.asked


async def test_an_input_at_its_bounds_is_run(frontend: Frontend, model: Model) -> None:
    text = b"".join(json.dumps(each).encode() + b"\n" for each in lines(48))
    text += long_line(10_000) + b"\r\n" + long_line(10_000).replace(b"id x", b"id y") + b"\n"
    made = await frontend.ask("POST", "/v1/batches", ordered(frontend.upload(text)))
    async with frontend.running():
        batch = await frontend.until(made["id"], "completed")
    assert batch["request_counts"] == {"total": 50, "completed": 50, "failed": 0}


async def test_one_model_is_as_many_to_a_line_for_a_model_that_is_not_there(frontend: Frontend, model: Model) -> None:
    frontend.table.replace([frontend.entry])
    unknown = line("x", body={"model": "x", "prompt": "x"})
    made = await frontend.order(line("a"), unknown)
    async with frontend.running():
        batch = await frontend.until(made, "failed")
    (error,) = batch["errors"]["data"]
    assert (error["code"], error["line"], error["param"]) == ("model_not_found", 2, "body.model")
    assert not model.asked


async def test_an_input_may_have_a_byte_order_mark_and_lines_as_windows_ends_them(frontend: Frontend) -> None:
    text = "\r\n".join(json.dumps(line(prompt), ensure_ascii=False) for prompt in ("\u00e4", "b")) + "\r\n"
    made = await frontend.ask("POST", "/v1/batches", ordered(frontend.upload(text.encode("utf-8-sig"))))
    async with frontend.running():
        batch = await frontend.until(made["id"], "completed")
    assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    assert (await frontend.results(batch["output_file_id"])).keys() == {"id \u00e4", "id b"}


async def test_lines_of_results_are_whole_for_every_reader(frontend: Frontend) -> None:
    prompt = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\r\nj"
    batch_id = await frontend.order(line(prompt), line("x"))
    async with frontend.running():
        batch = await frontend.until(batch_id, "completed")
    answer = await call(frontend.gate, scope(f"/v1/files/{batch['output_file_id']}/content", "GET"))
    texts = [json.loads(each)["response"]["body"]["text"] for each in answer.body.decode().splitlines()]
    assert sorted(texts) == [prompt, "x"]


async def test_an_order_that_cannot_be_is_refused_at_once(frontend: Frontend) -> None:
    file_id = frontend.upload(b"x")
    for changes, message in (
        ({"input_file_id": "file-" + "0" * 24}, "input_file_id: no such file"),
        ({"endpoint": "/v1/files"}, "endpoint must be one of"),
        ({"completion_window": "1s"}, "completion_window"),
    ):
        refused = await frontend.ask("POST", "/v1/batches", ordered(file_id) | changes)
        assert refused["http"] == 400
        assert message in refused["error"]["message"]
    # Those that come at the same time as well.
    made = await asyncio.gather(*(frontend.ask("POST", "/v1/batches", ordered(file_id)) for _ in range(8)))
    assert Counter(each["http"] for each in made) == {200: LIMITS.max_batches, 507: 8 - LIMITS.max_batches}
    assert (await frontend.ask("GET", "/v1/batches/batch_x"))["http"] == 404


async def test_a_cancelled_batch_keeps_what_was_done(frontend: Frontend, model: Model) -> None:
    model.stops_at = "5"
    batch_id = await frontend.order(*lines(20))
    async with frontend.running():
        await until(lambda: model.asked["5"] == 1)
        assert (await frontend.ask("POST", f"/v1/batches/{batch_id}/cancel"))["status"] == "cancelling"
        batch = await frontend.until(batch_id, "cancelled")
    counts = batch["request_counts"]
    output, errors = await frontend.results(batch["output_file_id"]), await frontend.results(batch["error_file_id"])
    assert (len(output), len(errors)) == (counts["completed"], counts["failed"])
    assert output.keys() | errors.keys() == {f"id {n}" for n in range(20)}
    assert {each["error"]["code"] for each in errors.values()} == {"batch_cancelled"}
    # Nothing of it is in flight any more.
    assert frontend.entry.in_flight.total == 0
    assert (await frontend.ask("POST", f"/v1/batches/{batch_id}/cancel"))["status"] == "cancelled"


async def test_a_batch_expires_with_what_was_done(frontend: Frontend, model: Model) -> None:
    frontend.ready = False
    batch_id = await frontend.order(*lines(3))
    async with frontend.running():
        await frontend.until(batch_id, "in_progress")
        assert not model.asked
        frontend.now += 3600
        batch = await frontend.until(batch_id, "expired")
    errors = await frontend.results(batch["error_file_id"])
    assert {each["error"]["code"] for each in errors.values()} == {"batch_expired"}
    assert batch["request_counts"] == {"total": 3, "completed": 0, "failed": 3}


async def test_a_batch_ends_with_its_key(frontend: Frontend, model: Model) -> None:
    model.open.clear()
    batch_id = await frontend.order(*lines(3))
    async with frontend.running():
        await until(lambda: model.asked.total() >= 1)
        frontend.callers = lambda _: None
        assert (await frontend.until(batch_id, "cancelled"))["request_counts"]["completed"] == 0


async def test_a_model_without_workers_is_waited_for(frontend: Frontend, model: Model) -> None:
    frontend.ready = False
    batch_id = await frontend.order(*lines(3))
    async with frontend.running():
        await frontend.until(batch_id, "in_progress")
        frontend.ready = True
        await frontend.until(batch_id, "completed")
    assert model.asked.total() == 3


async def test_a_model_without_workers_does_not_hold_up_lines_for_others(frontend: Frontend, model: Model) -> None:
    frontend.ready = False
    frontend.table.entries[1].members = lambda: [WORKER]
    waiting = lines(2 * LIMITS.max_batch_requests)
    others = [line(f"other {n}", body={"model": "other", "prompt": f"other {n}", "max_tokens": 1}) for n in range(3)]
    batch_id = await frontend.order(*waiting, *others)
    async with frontend.running():
        await until(lambda: model.asked.total() == len(others))
        frontend.ready = True
        batch = await frontend.until(batch_id, "completed")
    assert set(model.asked.values()) == {1}
    assert batch["request_counts"]["completed"] == len(waiting) + len(others)


async def test_batches_for_a_model_without_workers_do_not_hold_up_others(tmp_path: Path, model: Model) -> None:
    frontend = Frontend(tmp_path, model, replace(LIMITS, max_batches=9))
    frontend.ready = False
    frontend.table.entries[1].members = lambda: [WORKER]
    waiting = [await frontend.order(*lines(2)) for _ in range(AT_ONCE + 1)]
    frontend.now += 1
    other = await frontend.order(line("o", body={"model": "other", "prompt": "o", "max_tokens": 1}))
    async with frontend.running():
        await frontend.until(other, "completed")
        assert model.asked.total() == 1
        frontend.ready = True
        for batch_id in waiting:
            await frontend.until(batch_id, "completed")


async def test_people_go_first(frontend: Frontend, model: Model) -> None:
    frontend.entry.enter(1)
    pauses = frontend.entry.pauses = Pauses()
    model.open.clear()
    batch_id = await frontend.order(*lines(20))
    async with frontend.running():
        await until(lambda: model.asked.total() == 1)
        # One line for each worker while somebody else asks; more when nobody does.
        assert pauses.kept[-1] == (1, 1000)
        await asyncio.sleep(0.3)
        assert model.asked.total() == 1
        frontend.entry.leave(1)
        await until(lambda: model.asked.total() == LIMITS.max_batch_requests)
        assert not pauses.kept
        model.open.set()
        await frontend.until(batch_id, "completed")
    assert model.asked.total() == 20


async def test_lines_follow_their_model(frontend: Frontend, model: Model) -> None:
    """An endpoint without workers gets an entry of another kind when it has some."""
    frontend.ready = False
    frontend.entry.enter(1)
    pauses = frontend.entry.pauses = Pauses()
    batch_id = await frontend.order(*lines(12))
    async with frontend.running():
        await until(lambda: len(pauses.kept) > 0)
        other = ModelEntry(["m"], lambda: None, frontend.entry.limits, model)
        other.members = lambda: [WORKER]
        frontend.table.replace([other])
        await frontend.until(batch_id, "completed")
    assert model.asked.total() == 12
    # What is left at the former one goes on to its end.
    assert not pauses.kept


@pytest.mark.parametrize("wake", ["true", "false"])
async def test_a_model_without_workers_is_asked_only_by_a_batch_that_may_wake_it(frontend: Frontend, wake: str) -> None:
    frontend.ready = False
    batch_id = await frontend.order(*lines(5), metadata={"wake": wake})
    async with frontend.running():
        await frontend.until(batch_id, "in_progress")
        if wake == "true":
            await until(lambda: frontend.attempts > 0)
        else:
            await asyncio.sleep(0.3)
            assert frontend.attempts == 0
        await frontend.ask("POST", f"/v1/batches/{batch_id}/cancel")
        assert (await frontend.until(batch_id, "cancelled"))["request_counts"]["completed"] == 0


async def test_one_frontend_runs_a_batch_and_another_goes_on(tmp_path: Path, model: Model) -> None:
    first, other = Frontend(tmp_path, model), Frontend(tmp_path, model)
    model.stops_at = "5"
    batch_id = await first.order(*lines(30))
    async with other.running():
        async with first.running():
            await until(lambda: model.asked["5"] == 1)
            owners = [bool(each.entry.in_flight.total) for each in (first, other)]
            assert owners.count(True) == 1
        model.stops_at = ""
        model.open.set()
        batch = await other.until(batch_id, "completed")
    output = await other.results(batch["output_file_id"])
    assert output.keys() == {f"id {n}" for n in range(30)}
    # What was in flight was computed again, at most.
    assert 30 <= model.asked.total() <= 30 + LIMITS.max_batch_requests


async def test_what_a_kill_has_cut_off_is_done_again(tmp_path: Path, model: Model) -> None:
    frontend = Frontend(tmp_path, model, replace(LIMITS, max_batch_requests=1))
    model.stops_at = "3"
    batch_id = await frontend.order(*lines(5))
    async with frontend.running():
        await until(lambda: model.asked["3"] == 1)
    results = tmp_path / "test.batches" / batch_id / "output.jsonl"
    done = results.read_bytes().splitlines(keepends=True)
    assert done
    results.write_bytes(b"".join(done) + done[0][:-10])
    model.stops_at = ""
    model.open.set()
    again = Frontend(tmp_path, model)
    async with again.running():
        batch = await again.until(batch_id, "completed")
        await until(lambda: not results.exists())
    assert len(await again.results(batch["output_file_id"])) == 5
    assert batch["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
