"""The bus on a real NATS server: what is delivered, what is refused, and what a lost connection means."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from nats.aio.msg import Msg
from nats.errors import NoRespondersError

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus, RawMessage
from dynamo_local.core import codec
from dynamo_local.core.errors import BusError, DecodeError
from dynamo_local.core.messages.admin import RoleAnswer, RoleQuestion
from dynamo_local.core.messages.presence import LeaseRevoked
from dynamo_local.core.subjects import Subjects
from dynamo_local.tasks import TaskGuard
from tests.integration.conftest import Connect
from tests.integration.fleet_of_fakes import until
from tests.integration.nats_process import NatsProcess

pytestmark = pytest.mark.integration

DEADLINE_S = 60.0


class Received:
    """A handler that keeps what it is given."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[RawMessage] = asyncio.Queue()

    async def __call__(self, message: RawMessage) -> None:
        self._queue.put_nowait(message)

    async def next(self) -> RawMessage:
        return await asyncio.wait_for(self._queue.get(), DEADLINE_S)

    @property
    def empty(self) -> bool:
        return self._queue.empty()


# Delivery


async def test_messages_arrive_in_order_one_after_another(bus: Bus, subjects: Subjects) -> None:
    at_work, most, seen, done = 0, 0, list[bytes](), asyncio.Event()

    async def handle(message: RawMessage) -> None:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        await asyncio.sleep(0)
        at_work -= 1
        seen.append(message.data)
        if len(seen) == 200:
            done.set()

    await bus.subscribe(subjects.probe, handle)
    for number in range(200):
        await bus.publish(subjects.probe, str(number).encode())
    await asyncio.wait_for(done.wait(), DEADLINE_S)
    assert seen == [str(number).encode() for number in range(200)]
    assert most == 1


async def test_a_handler_that_fails_loses_only_its_message(
    bus: Bus, subjects: Subjects, caplog: pytest.LogCaptureFixture
) -> None:
    received = Received()

    async def handle(message: RawMessage) -> None:
        if message.data == b"bad":
            raise ValueError("cannot be handled")
        await received(message)

    await bus.subscribe(subjects.probe, handle)
    await bus.publish(subjects.probe, b"bad")
    await bus.publish(subjects.probe, b"good")
    assert (await received.next()).data == b"good"
    assert "cannot be handled" in caplog.text


async def test_a_queue_shares_what_others_all_get(connect: Connect, subjects: Subjects) -> None:
    publisher, everyone, shared = await connect(), Received(), Received()
    for _ in range(2):
        member = await connect()
        await member.subscribe(subjects.assign, shared, queue="router")
        await member.flush()
    await publisher.subscribe(subjects.assign, everyone)
    sent = [str(number).encode() for number in range(20)]
    for data in sent:
        await publisher.publish(subjects.assign, data)
    assert [(await everyone.next()).data for _ in sent] == sent
    assert sorted([(await shared.next()).data for _ in sent]) == sorted(sent)
    assert shared.empty


async def test_after_unsubscribing_nothing_more_arrives(bus: Bus, subjects: Subjects) -> None:
    received, later = Received(), Received()
    subscription = await bus.subscribe(subjects.probe, received)
    await subscription.unsubscribe()
    await bus.subscribe(subjects.probe, later)
    await bus.publish(subjects.probe, b"late")
    assert (await later.next()).data == b"late"
    assert received.empty
    await bus.close()
    await subscription.unsubscribe()


# Questions


async def test_a_question_is_answered(connect: Connect, subjects: Subjects) -> None:
    asker, answerer = await connect(), await connect()

    async def answer(message: RawMessage) -> None:
        await answerer.publish(message.reply, message.data[::-1])

    await answerer.subscribe(subjects.assign, answer)
    await answerer.flush()
    assert await asker.request(subjects.assign, b"abc", timeout_s=DEADLINE_S) == b"cba"


async def test_after_a_flush_the_server_knows_what_came_before(connect: Connect, subjects: Subjects) -> None:
    asker, answerer = await connect(), await connect()

    async def answer(message: RawMessage) -> None:
        await answerer.publish(message.reply, b"")

    for number in range(100):
        await answerer.subscribe(f"{subjects.assign}.{number}", answer)
        await answerer.flush()
        await asker.request(f"{subjects.assign}.{number}", b"", timeout_s=DEADLINE_S)


async def test_a_question_to_nobody_fails_at_once(bus: Bus, subjects: Subjects) -> None:
    with pytest.raises(BusError, match="no process listens"):
        await bus.request(subjects.assign, b"", timeout_s=DEADLINE_S)


async def test_a_question_that_is_not_answered_fails_in_time(bus: Bus, subjects: Subjects) -> None:
    await bus.subscribe(subjects.assign, Received())
    with pytest.raises(BusError, match="no answer"):
        await bus.request(subjects.assign, b"", timeout_s=0.01)


async def test_a_message_of_another_kind_is_logged_and_dropped(
    bus: Bus, subjects: Subjects, caplog: pytest.LogCaptureFixture
) -> None:
    received: asyncio.Queue[LeaseRevoked] = asyncio.Queue()

    async def handle(revoked: LeaseRevoked) -> None:
        received.put_nowait(revoked)

    await bus.listen(subjects.revoked, LeaseRevoked, handle)
    other_version = msgspec.msgpack.encode((99, LeaseRevoked("a")))
    for data in (b"", b"\xc1", codec.encode(RoleQuestion("decode")), other_version):
        await bus.publish(subjects.revoked, data)
    await bus.send(subjects.revoked, LeaseRevoked("b"))
    assert await asyncio.wait_for(received.get(), DEADLINE_S) == LeaseRevoked("b")
    assert received.empty()
    assert caplog.text.count(f"a message on {subjects.revoked} is ignored") == 4


async def test_a_request_is_answered_at_once_or_later_and_without_need_of_an_answer(
    connect: Connect, subjects: Subjects
) -> None:
    asker, server = await connect(), await connect()
    begun, goes_on, tasks = asyncio.Event(), asyncio.Event(), TaskGuard()

    async def handle(question: RoleQuestion) -> RoleAnswer:
        if question.role == "later":
            begun.set()
            await goes_on.wait()
        return RoleAnswer(question.role)

    async def ask(role: str) -> RoleAnswer:
        return await asker.ask(subjects.role("w"), RoleQuestion(role), RoleAnswer, timeout_s=DEADLINE_S)

    await server.serve(subjects.role("w"), RoleQuestion, handle, tasks=tasks)
    await server.flush()
    waiting = asyncio.create_task(ask("later"))
    await asyncio.wait_for(begun.wait(), DEADLINE_S)
    await asker.send(subjects.role("w"), RoleQuestion("nobody waits for this"))
    # The one that is answered later holds up none behind it.
    assert await ask("now") == RoleAnswer("now")
    goes_on.set()
    assert await waiting == RoleAnswer("later")


@pytest.mark.parametrize("in_tasks", [False, True])
async def test_a_request_that_cannot_be_handled_is_logged_and_ends_nothing(
    connect: Connect, subjects: Subjects, caplog: pytest.LogCaptureFixture, in_tasks: bool
) -> None:
    asker, server, tasks = await connect(), await connect(), TaskGuard()
    failures: list[BaseException] = []
    tasks.on_failure(failures.append)

    async def handle(revision: str, question: RoleQuestion) -> RoleAnswer:
        if question.role == "broken":
            raise KeyError(question.role)
        return RoleAnswer(f"{question.role} of {revision}")

    every, chat = Subjects(subjects.namespace, "*"), Subjects(subjects.namespace, "chat@2")
    await server.serve_each(every.role("w"), RoleQuestion, handle, tasks=tasks if in_tasks else None)
    await server.flush()
    await asker.send(chat.role("w"), RoleQuestion("broken"))
    answered = await asker.ask(chat.role("w"), RoleQuestion("decode"), RoleAnswer, timeout_s=DEADLINE_S)
    assert answered == RoleAnswer("decode of chat@2")
    assert f"message on {chat.role('w')} could not be handled" in caplog.text
    assert failures == []


async def test_an_answer_of_another_kind_is_an_error(connect: Connect, subjects: Subjects) -> None:
    asker, server = await connect(), await connect()

    async def handle(_: RoleQuestion) -> LeaseRevoked:
        return LeaseRevoked("a")

    await server.serve(subjects.role("w"), RoleQuestion, handle)
    await server.flush()
    with pytest.raises(DecodeError, match="not a RoleAnswer"):
        await asker.ask(subjects.role("w"), RoleQuestion("decode"), RoleAnswer, timeout_s=DEADLINE_S)


async def test_an_answer_that_cannot_be_sent_is_logged(
    connect: Connect, subjects: Subjects, caplog: pytest.LogCaptureFixture
) -> None:
    asker, server = await connect(), await connect()

    async def handle(question: RoleQuestion) -> RoleAnswer:
        return RoleAnswer("x" * server.max_payload if question.role == "large" else "small")

    await server.serve(subjects.role("w"), RoleQuestion, handle)
    await server.flush()
    await asker.send(subjects.role("w"), RoleQuestion("large"), reply=asker.inbox())
    answered = await asker.ask(subjects.role("w"), RoleQuestion("decode"), RoleAnswer, timeout_s=DEADLINE_S)
    assert answered == RoleAnswer("small")
    assert f"a request on {subjects.role('w')} is not answered" in caplog.text


async def test_no_answer_can_be_sent_to_nowhere(bus: Bus) -> None:
    with pytest.raises(BusError):
        await bus.publish("", b"")
    await bus.flush()
    assert bus.connected


async def test_a_message_too_large_is_refused_and_breaks_nothing(bus: Bus, subjects: Subjects) -> None:
    received = Received()
    await bus.subscribe(subjects.probe, received)
    with pytest.raises(BusError, match="at most"):
        await bus.publish(subjects.probe, bytes(bus.max_payload + 1))
    with pytest.raises(BusError):
        await bus.request(subjects.probe, bytes(bus.max_payload + 1), timeout_s=1)
    await bus.publish(subjects.probe, bytes(bus.max_payload))
    assert len((await received.next()).data) == bus.max_payload


# Connecting


@pytest.mark.parametrize("token", ["wrong-secret", None])
async def test_a_refused_token_is_told_at_once_and_not_shown(
    nats_address: BusAddress, token: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    address = msgspec.structs.replace(nats_address, token=token)
    with pytest.raises(BusError, match="refuses the token") as failure:
        await asyncio.wait_for(Bus.connect(address, name="test", deadline_s=600), DEADLINE_S)
    assert "wrong-secret" not in f"{failure.value} {address!r} {caplog.text}"
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize(
    "url",
    [
        "nats://127.0.0.1:1",
        "nats://u:hidden@127.0.0.1:1",
        "nats://",
        "",
        "nats://127.0.0.1:-1",
        "nats://[::1",
    ],
)
async def test_who_is_not_there_is_told_without_secrets(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(BusError, match="cannot connect") as failure:
        await Bus.connect(BusAddress(url, "secret"), name="test", deadline_s=0.05)
    assert not {"secret", "hidden"} & set(f"{failure.value} {caplog.text} {BusAddress(url, 'secret')!r}".split())
    assert "hidden" not in str(failure.value)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_connection_in_use_leaves_no_task_when_closed(nats_address: BusAddress, subjects: Subjects) -> None:
    bus = await Bus.connect(nats_address, name="test")
    await bus.subscribe(subjects.probe, Received())
    await bus.close()
    await bus.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    for use in (bus.publish(subjects.probe, b""), bus.flush(), bus.subscribe(subjects.probe, Received())):
        with pytest.raises(BusError):
            await use


def test_an_address_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "bus.json"
    path.write_text('{"url": "nats://127.0.0.1:4222"}')
    assert BusAddress.load(path) == BusAddress("nats://127.0.0.1:4222", None)
    for content in ("", "[]", '{"token": "a"}'):
        path.write_text(content)
        with pytest.raises(BusError, match="bus address"):
            BusAddress.load(path)
    with pytest.raises(BusError):
        BusAddress.load(tmp_path / "absent.json")


# A server that goes and comes back


async def test_after_a_restart_of_the_server_subscriptions_are_back(
    own_nats: NatsProcess, subjects: Subjects, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    bus, received = await Bus.connect(own_nats.address, name="test"), Received()
    await bus.subscribe(subjects.probe, received)
    await bus.flush()
    own_nats.kill()
    await until(lambda: not bus.connected)
    await bus.publish(subjects.probe, b"held back")
    own_nats.start()
    assert (await received.next()).data == b"held back"
    await bus.publish(subjects.probe, b"afterwards")
    assert (await received.next()).data == b"afterwards"
    told = [record.message for record in caplog.records if record.name == "dynamo_local.bus.nats"]
    assert [re.sub(r"[0-9.]+", "N", line) for line in told] == [
        "NATS connection lost; reconnecting",
        "NATS reconnected after N s",
    ]
    await bus.close()


async def test_what_is_held_back_is_bounded(own_nats: NatsProcess, subjects: Subjects) -> None:
    bus = await Bus.connect(own_nats.address, name="test")
    own_nats.kill()
    await until(lambda: not bus.connected)
    megabyte, held_back = bytes(1024 * 1024), 0
    with suppress(BusError):
        while held_back < 100:
            await bus.publish(subjects.probe, megabyte)
            held_back += 1
    assert 0 < held_back < 100
    await asyncio.wait_for(bus.close(), DEADLINE_S)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_connection_that_the_server_ends_for_good_is_a_failure(bus: Bus, subjects: Subjects) -> None:
    failing = asyncio.create_task(bus.failed())
    # More than the server takes: it answers with an error and hangs up, which is what it does to any violation.
    bus._client._max_payload = 2**30
    await bus.publish(subjects.probe, bytes(9 * 1024 * 1024))
    with pytest.raises(BusError, match="ended the connection"):
        await asyncio.wait_for(failing, DEADLINE_S)


@pytest.mark.parametrize("answered", [True, False])
async def test_a_cancellation_that_comes_with_the_answer_is_not_lost(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    asked = asyncio.Event()

    async def swallow(*_: object, **__: object) -> Msg:
        """Swallow a cancellation, as asyncio.wait_for does when its result is there already."""
        asked.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        if not answered:
            raise NoRespondersError
        return Msg(bus._client, data=b"an answer")

    monkeypatch.setattr(bus._client, "request", swallow)
    asking = asyncio.create_task(bus.request("dyn.test", b"", timeout_s=1.0))
    await asked.wait()
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled()
