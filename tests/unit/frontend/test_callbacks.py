"""Callbacks of tasks: signed, at least once, until they are taken, and only to where they may go."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest

from components.frontend.async_tasks import keeper
from components.frontend.async_tasks.calling import CallError, Calling, LookUps
from dynamo_local.core.async_tasks.callbacks import AT_ONCE_FOR_ORIGIN, CallbackLimits, Target, secret_of, secret_text
from dynamo_local.core.async_tasks.records import Task, TaskHead, TaskResult
from state.async_tasks.secret import callback_secret
from tests.unit.frontend.kept_scene import until
from tests.unit.frontend.receivers import Receiver
from tests.unit.frontend.test_async_tasks import Frontend, Model
from tests.unit.state.answers.disks import FullDisk

LOOPBACK = "127.0.0.1/32"


class CountingDisk(FullDisk):
    """Counts what it did not synchronise."""

    failed = 0

    def sync(self, descriptor: int) -> None:
        self.failed += self.is_full
        super().sync(descriptor)


class Filling(Receiver):
    """A receiver that fills this disk with each call."""

    def __init__(self, disk: FullDisk) -> None:
        super().__init__()
        self._disk = disk

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._disk.is_full = True
        await super()._serve(reader, writer)


async def told(frontend: Frontend, task: str, status: str) -> dict[str, Any]:
    async with asyncio.timeout(30):
        while (found := await frontend.show(task)).get("callback", {}).get("status") != status:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found


async def test_a_receiver_that_fails_is_called_until_it_takes_the_result(tmp_path: Path) -> None:
    receiver = Receiver(500, 302)
    async with receiver.listening(), Frontend(tmp_path, Model(), allow=LOOPBACK).running() as frontend:
        auth = {"kind": "basic", "username": "u", "password": "p"}
        task = await frontend.order("x", callback_url=receiver.url, callback_auth=auth)
        found = await told(frontend, task, "DELIVERED")
        assert found["callback"] == {"status": "DELIVERED", "calls": 3, "last": "status 200"}
        await until(lambda: not frontend.store.look().running)
    headers = [headers for headers, _ in receiver.calls]
    assert {each["line"] for each in headers} == {"POST /done?x=1 HTTP/1.1"}
    assert {each["authorization"] for each in headers} == {"Basic dTpw"}
    assert {each["webhook-id"] for each in headers} == {f"evt_{task.removeprefix('task_')}"}
    assert receiver.events[0] == receiver.events[2]
    data = {"task_id": task, "status": "SUCCESS", "result": {"text": "x"}, "traceback": None, "status_code": 200}
    assert receiver.events[0]["data"] == data
    secret = secret_text(secret_of(callback_secret(frontend.paths), "api-key-file"))
    for sent, body in receiver.calls:
        openai.OpenAI(api_key="none").webhooks.verify_signature(body, sent, secret=secret, tolerance=10**10)
    assert frontend.paths.callback_secret_file.stat().st_mode & 0o777 == 0o600


async def test_a_call_that_cannot_be_recorded_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_AGAIN_S", 0.01)

    disk = CountingDisk()
    receiver = Filling(disk)
    async with receiver.listening(), Frontend(tmp_path, Model(), disk, allow=LOOPBACK).running() as frontend:
        task = await frontend.order("x", callback_url=receiver.url)
        await until(lambda: disk.failed >= 3)
        disk.is_full = False
        assert (await told(frontend, task, "DELIVERED"))["callback"]["calls"] == 1
    assert len(receiver.calls) == 1


async def test_a_task_whose_call_cannot_be_recorded_can_be_deleted(tmp_path: Path) -> None:
    disk = CountingDisk()
    receiver = Filling(disk)
    async with receiver.listening(), Frontend(tmp_path, Model(), disk, allow=LOOPBACK).running() as frontend:
        task = await frontend.order("x", callback_url=receiver.url)
        await until(lambda: disk.is_full and not frontend.keeper.in_hand)
        await frontend.ask("DELETE", f"/{task}")
        await until(lambda: frontend.store.all() == [])


async def test_a_callback_goes_on_at_another_frontend(tmp_path: Path) -> None:
    receiver, model = Receiver(), Model()
    async with receiver.listening():
        pass
    async with Frontend(tmp_path, model, allow=LOOPBACK).running() as frontend:
        frontend.pause_s = lambda calls: 3600.0
        task = await frontend.order("x", callback_url=receiver.url)
        async with asyncio.timeout(30):
            while not (await frontend.show(task))["callback"]["calls"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    async with receiver.listening(), Frontend(tmp_path, model, allow=LOOPBACK).running() as frontend:
        assert (await told(frontend, task, "DELIVERED"))["callback"]["calls"] == 2
    assert model.asked == {"x": 1}
    assert len(receiver.calls) == 1


@pytest.mark.parametrize(
    ("receiver", "calls", "last"),
    [
        (Receiver(410), 1, "status 410"),
        (Receiver(*[503] * 9), 4, "status 503"),
        (Receiver(answers=b"SSH-2.0-OpenSSH_9\r\n"), 4, "no HTTP"),
        (Receiver(answers=b"HTTP/1.1 100 Go on\r\nx: y\r\n\r\n" * 500), 4, "does not come to its end"),
        (Receiver(answers=b"HTTP/1.1 " + b"2" * 100_000), 4, "no answer"),
    ],
)
async def test_a_receiver_that_never_takes_it_is_given_up(
    tmp_path: Path, receiver: Receiver, calls: int, last: str
) -> None:
    async with receiver.listening(), Frontend(tmp_path, Model(), allow=LOOPBACK).running() as frontend:
        task = await frontend.order("x", callback_url=receiver.url)
        found = await told(frontend, task, "FAILED")
        assert (found["status"], found["callback"]["calls"]) == ("SUCCESS", calls)
        assert last in found["callback"]["last"]
        await until(lambda: not frontend.store.look().running)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"callback_url": "http://127.0.0.1:1/"}, "callback_url: 127.0.0.1 is 127.0.0.1, where callbacks may not go"),
        ({"callback_url": "http://localhost:1/"}, "where callbacks may not go"),
        ({"callback_url": "http://2130706433/"}, "where callbacks may not go"),
        ({"callback_url": "http://[::ffff:10.0.0.1]/"}, "where callbacks may not go"),
        ({"callback_url": "ftp://example.com/"}, "scheme"),
        ({"callback_url": "http://h/" + "x" * 2100}, "2048"),
        ({"callback_auth": {"kind": "basic"}}, "no callback_url"),
        ({"callback_url": "http://x.invalid/", "callback_auth": {"kind": "mtls"}}, "callback_auth.kind"),
        ({"callback_url": "http://nobody.invalid/"}, "nobody.invalid cannot be found"),
    ],
)
async def test_what_is_wrong_is_named(tmp_path: Path, more: dict[str, Any], why: str) -> None:
    async with Frontend(tmp_path, Model()).running() as frontend:
        refused = await frontend.ask("POST", "", {"args": {"prompt": "x"}, **more}, query="model_endpoint_id=chat")
        assert refused["http"] == 400
        assert why in refused["error"]["message"]


async def test_an_address_that_has_become_another_is_not_called(tmp_path: Path) -> None:
    """A name that was public when the task was ordered, and is not when the receiver is called."""
    receiver = Receiver()
    head = TaskHead(
        task="task_" + "0" * 32,
        model="chat",
        path="/",
        priority=0,
        created_at=1,
        callback_url="http://localhost:1/",
    )
    async with receiver.listening():
        calling = Calling(CallbackLimits(), lambda: b"x" * 32, lambda: 1.0)
        made = await calling.attempt("", Task(head, b"", result=TaskResult(200, b"{}", 1)))
    assert (made.is_delivered, made.is_last, receiver.calls) == (False, False, [])
    assert "where callbacks may not go" in made.outcome


async def test_a_task_that_is_deleted_is_not_told(tmp_path: Path) -> None:
    receiver = Receiver(*[500] * 3)
    async with receiver.listening(), Frontend(tmp_path, Model(), allow=LOOPBACK).running() as frontend:
        frontend.pause_s = lambda calls: 3600.0
        task = await frontend.order("x", callback_url=receiver.url)
        await until(lambda: len(receiver.calls) == 1)
        assert (await frontend.ask("DELETE", f"/{task}"))["http"] == 200
        assert frontend.store.all() == []
    assert len(receiver.calls) == 1


async def test_the_pause_until_the_next_call_is_that_of_whoever_called_last(tmp_path: Path) -> None:
    """The pause between two calls holds for another frontend, and after a restart."""
    receiver, model = Receiver(503), Model()
    async with receiver.listening():
        async with Frontend(tmp_path, model, allow=LOOPBACK).running() as frontend:
            frontend.pause_s = lambda calls: 3600.0
            task = await frontend.order("x", callback_url=receiver.url)
            await until(lambda: len(receiver.calls) == 1)
            await until(lambda: not frontend.keeper.in_hand)
        early = Frontend(tmp_path, model, allow=LOOPBACK)
        early.pause_s, early.wall_time = frontend.pause_s, frontend.wall_time + 3599
        async with early.running():
            assert early.keeper.tasks() == {}
            await told(early, await early.order("y", callback_url=receiver.url), "DELIVERED")
            assert (await early.show(task))["callback"]["calls"] == 1
        late = Frontend(tmp_path, model, allow=LOOPBACK)
        late.pause_s, late.wall_time = frontend.pause_s, frontend.wall_time + 3600
        async with late.running():
            assert (await told(late, task, "DELIVERED"))["callback"]["calls"] == 2


async def test_a_call_under_way_holds_up_no_deletion(tmp_path: Path) -> None:
    connected = asyncio.Event()

    async def never_answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(never_answers, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    frontend = Frontend(tmp_path, Model(), allow=LOOPBACK, callback_timeout_s=3600.0)
    async with server, frontend.running():
        task = await frontend.order("x", callback_url=url)
        await connected.wait()
        assert (await frontend.ask("DELETE", f"/{task}"))["http"] == 200
        assert frontend.store.all() == []


async def test_what_others_have_had_answered_is_called_within_the_bounds(tmp_path: Path) -> None:
    calls, end = Counter[str](), asyncio.Event()

    async def answers_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls["now"] += 1
        calls["most"] = max(calls["most"], calls["now"])
        await reader.readuntil(b"\r\n\r\n")
        await end.wait()
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        calls["now"] -= 1
        writer.close()

    server = await asyncio.start_server(answers_late, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    model = Model()
    model.open.clear()
    one = Frontend(tmp_path, model, allow=LOOPBACK)
    two = Frontend(tmp_path, model, allow=LOOPBACK, callback_timeout_s=3600.0)
    async with server:
        async with one.running():
            tasks = [await one.order(str(n), callback_url=url) for n in range(10)]
            heads = [one.store.find("api-key-file", task).head for task in tasks]
        for head in heads:
            taken = one.store.take("api-key-file", head.task)
            assert taken is not None
            taken.record(TaskResult(200, b"{}", 1))
            taken.release()
        async with two.running():
            for head in heads:
                two.keeper.note_new("api-key-file", head)
            await until(lambda: calls["now"] == AT_ONCE_FOR_ORIGIN)
            end.set()
            for task in tasks:
                await told(two, task, "DELIVERED")
    assert calls["most"] == AT_ONCE_FOR_ORIGIN


async def test_an_address_needs_no_look_up_and_owners_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look_ups, ends = LookUps(), threading.Event()

    def getaddrinfo(host: str, *_: Any, **__: Any) -> list[Any]:
        if host == "slow":
            ends.wait()
        return [(0, 0, 0, "", ("192.0.2.1", 80))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    slow = [asyncio.create_task(look_ups.find("a", Target(False, "slow", 80, "/"))) for _ in range(9)]
    try:
        assert await look_ups.find("b", Target(False, "quick", 80, "/")) == ["192.0.2.1"]
        assert await look_ups.find("a", Target(False, "::1", 80, "/")) == ["::1"]
        assert not any(each.done() for each in slow)
    finally:
        ends.set()
    assert await asyncio.gather(*slow) == [["192.0.2.1"]] * 9


async def test_a_look_up_that_cannot_begin_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    look_ups = LookUps()

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        for _ in range(99):
            with pytest.raises(CallError, match="cannot be looked up now"):
                await look_ups.find("a", Target(False, "localhost", 80, "/"))
    async with asyncio.timeout(30):
        assert await look_ups.find("a", Target(False, "localhost", 80, "/"))
