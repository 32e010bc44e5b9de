"""Endpoint calls between two connections to a real NATS server."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus, RawMessage
from dynamo_local.bus.rpc import (
    WINDOW,
    Alive,
    Begin,
    CallClient,
    CallServer,
    End,
    Frame,
    Hangup,
    NotTaken,
    RemoteService,
    Reply,
    Taken,
)
from dynamo_local.core import codec
from dynamo_local.core.errors import ConfigError, RpcError
from dynamo_local.core.subjects import Subjects
from dynamo_local.sdk import endpoint, service
from dynamo_local.tasks import TaskGuard
from tests.integration.nats_process import running_nats

pytestmark = pytest.mark.integration

BEAT_S = 0.15
"""Short, and yet a bus on a busy machine brings one of several beats in time."""
DEADLINE_S = 60.0


class Point(msgspec.Struct):
    x: int


@service()
class Echo:
    def __init__(self) -> None:
        self.produced = 0
        self.ended = asyncio.Event()
        self.started = asyncio.Event()
        self.go_on = asyncio.Event()

    @endpoint()
    async def count(self, upto: int) -> AsyncIterator[int]:
        try:
            for number in range(upto):
                self.produced = number + 1
                yield number
        finally:
            self.ended.set()

    @endpoint()
    async def endless(self) -> AsyncIterator[int]:
        self.started.set()
        try:
            yield 0
            await asyncio.Event().wait()
        finally:
            self.ended.set()

    @endpoint()
    async def when_told(self) -> str:
        self.started.set()
        await self.go_on.wait()
        return "told"

    @endpoint()
    async def move(self, point: Point) -> Point:
        return Point(point.x + 1)

    @endpoint()
    async def broken(self, after: int) -> AsyncIterator[int]:
        for number in range(after):
            yield number
        raise ValueError("two\nlines")

    @endpoint()
    async def misconfigured(self) -> None:
        raise ConfigError("no such thing", "name another")

    @endpoint("say-any")
    async def say(self, what: Any) -> Any:
        return what

    @endpoint()
    async def big(self, size: int) -> bytes:
        return b"x" * size

    @endpoint()
    async def odd(self) -> Any:
        return object()

    @endpoint()
    async def liar(self) -> Point:
        return "no point"  # type: ignore[return-value]


@dataclass
class Rig:
    """Connections to one namespace nobody else uses. Everything opened is closed at the end."""

    address: BusAddress
    stack: AsyncExitStack
    subjects: Subjects = field(default_factory=lambda: Subjects(f"t{uuid.uuid4().hex[:12]}"))

    async def bus(self) -> Bus:
        bus = await Bus.connect(self.address, name="test")
        self.stack.push_async_callback(bus.close)
        return bus

    async def server(self, instance: Echo, **options: Any) -> CallServer:
        tasks = TaskGuard()
        server = CallServer(await self.bus(), self.subjects, tasks, **{"beat_s": BEAT_S, **options})
        self.stack.push_async_callback(tasks.close)
        await server.start(instance)
        tasks.spawn("beat", server.run())
        return server

    async def client(self, *, beat: bool = True) -> CallClient:
        bus = await self.bus()
        client = CallClient(bus, self.subjects, beat_s=BEAT_S)
        await client.start()
        await bus.flush()
        if beat:
            tasks = TaskGuard()
            tasks.spawn("beat", client.run())
            self.stack.push_async_callback(tasks.close)
        return client

    async def echo(self) -> RemoteService:
        return (await self.client()).service(Echo)


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BusAddress]:
    with running_nats(tmp_path_factory.mktemp("nats")) as address:
        yield address


@pytest.fixture
async def rig(nats: BusAddress) -> AsyncIterator[Rig]:
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        yield Rig(nats, stack)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110  # what is waited for has no event
            await asyncio.sleep(0.005)


async def test_a_stream_comes_complete_and_in_order(rig: Rig) -> None:
    await rig.server(Echo())
    echo = await rig.echo()
    assert [number async for number in echo.count(1000)] == list(range(1000))
    assert [number async for number in echo.count(0)] == []


async def test_many_calls_at_once_do_not_mix(rig: Rig) -> None:
    server = await rig.server(Echo())
    echo = await rig.echo()

    async def collect(upto: int) -> list[int]:
        return [number async for number in echo.count(upto)]

    async with asyncio.TaskGroup() as group:
        tasks = {upto: group.create_task(collect(upto)) for upto in range(40)}
    assert {upto: task.result() for upto, task in tasks.items()} == {n: list(range(n)) for n in range(40)}
    await until(lambda: server.calls == 0)


async def test_one_reply_can_be_awaited_and_keeps_its_type(rig: Rig) -> None:
    await rig.server(Echo())
    echo = await rig.echo()
    assert await echo.move(Point(1)) == Point(2)
    assert await echo.say({"a": [1, None, b"x"]}) == {"a": [1, None, b"x"]}
    assert await echo.say(None) is None


async def test_the_error_of_an_endpoint_arrives_as_one_line_after_what_came_before(rig: Rig) -> None:
    await rig.server(Echo())
    echo = await rig.echo()
    replies = aiter(echo.broken(3))
    assert [await anext(replies) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RpcError) as caught:
        await anext(replies)
    assert str(caught.value) == "Echo.broken failed: ValueError: two lines"
    with pytest.raises(RpcError, match=r"Echo\.misconfigured failed: no such thing; name another"):
        await echo.misconfigured()
    assert await echo.say("still there") == "still there"


@pytest.mark.parametrize(
    ("method", "request_", "message"),
    [
        ("count", "x", "Echo.count failed: the request has the wrong type: Expected `int`"),
        ("move", object(), "the request to Echo.move cannot be sent"),
        ("odd", None, "Echo.odd failed: a reply cannot be sent"),
        ("liar", None, "Echo.liar sent a reply of the wrong type: Expected `object`"),
        ("endless", 1, "Echo.endless takes no request"),
        ("big", 9_000_000, "Echo.big failed: a reply has 9000005 bytes, too many for a message"),
        ("say", "x" * 9_000_000, "the request to Echo.say-any has .* bytes, too many for a message"),
        ("count", 2, "Echo.count answered with a stream where one reply was awaited; iterate"),
    ],
)
async def test_what_cannot_be_said_is_an_error_of_that_call(rig: Rig, method: str, request_: Any, message: str) -> None:
    server = await rig.server(Echo())
    echo = await rig.echo()
    with pytest.raises(RpcError, match=message):
        await getattr(echo, method)(request_)
    await until(lambda: server.calls == 0)
    assert await echo.say(1) == 1


async def test_an_unknown_endpoint_is_an_attribute_error(rig: Rig) -> None:
    echo = await rig.echo()
    with pytest.raises(AttributeError, match="Echo has no endpoint cuont; did you mean count"):
        _ = echo.cuont


async def test_closing_a_call_cancels_the_work(rig: Rig) -> None:
    instance = Echo()
    server = await rig.server(instance, beat_s=3600)  # no beat makes up for a hangup
    echo = await rig.echo()
    async with aclosing(echo.endless()) as replies:
        async for number in replies:
            assert number == 0
            break
    async with asyncio.timeout(DEADLINE_S):
        await instance.ended.wait()
    await until(lambda: server.calls == 0)


async def test_cancelling_who_waits_cancels_the_work(rig: Rig) -> None:
    instance = Echo()
    server = await rig.server(instance, beat_s=3600)  # no beat makes up for a hangup
    echo = await rig.echo()

    async def wait() -> Any:
        return await echo.when_told()

    waiting = asyncio.create_task(wait())
    await instance.started.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(lambda: server.calls == 0)


async def test_a_caller_that_died_costs_the_server_nothing_for_long(rig: Rig) -> None:
    instance = Echo()
    server = await rig.server(instance)
    client = await rig.client(beat=False)  # says nothing, as a killed process does
    call = client.call("Echo", "endless", b"")
    assert await anext(call) == msgspec.msgpack.encode(0)
    async with asyncio.timeout(DEADLINE_S):
        await instance.ended.wait()
    await until(lambda: server.calls == 0)
    await call.aclose()


async def test_a_slow_reader_holds_the_server_back(rig: Rig) -> None:
    instance = Echo()
    await rig.server(instance)
    echo = await rig.echo()
    async with aclosing(echo.count(10 * WINDOW)) as replies:
        async for number in replies:
            assert number == 0
            break
        await until(lambda: instance.produced > WINDOW)
        await asyncio.sleep(4 * BEAT_S)  # beats carry credit for what was read, and for no more
        assert instance.produced <= WINDOW + 2


async def test_a_quiet_endpoint_is_waited_for(rig: Rig) -> None:
    instance = Echo()
    await rig.server(instance)
    echo = await rig.echo()
    answer = asyncio.ensure_future(_awaited(echo.when_told()))
    await instance.started.wait()
    await asyncio.sleep(BEAT_S * 10)  # longer than silence is borne
    assert not answer.done()
    instance.go_on.set()
    assert await answer == "told"


async def _awaited(call: Any) -> Any:
    return await call


async def test_without_an_instance_the_call_fails(rig: Rig) -> None:
    echo = await rig.echo()
    with pytest.raises(RpcError, match=r"Echo\.say-any cannot be called: no instance of the service is ready"):
        await echo.say(1)


async def test_an_instance_that_comes_late_is_found(rig: Rig) -> None:
    echo = await rig.echo()
    answer = asyncio.ensure_future(_awaited(echo.say(1)))
    await asyncio.sleep(0)
    await rig.server(Echo())
    assert await answer == 1


async def test_a_full_instance_refuses_and_others_are_tried(rig: Rig) -> None:
    full = Echo()
    await rig.server(full, max_calls=1)
    echo = await rig.echo()
    async with aclosing(echo.endless()) as replies:
        assert await anext(aiter(replies)) == 0
        with pytest.raises(RpcError, match="cannot be called: it is at its limit of calls"):
            await echo.say(1)
        await rig.server(Echo())
        assert [await echo.say(n) for n in range(5)] == [0, 1, 2, 3, 4]


async def test_instances_share_the_calls(rig: Rig) -> None:
    one, two = Echo(), Echo()
    await rig.server(one)
    await rig.server(two)
    echo = await rig.echo()
    for _ in range(200):
        assert [number async for number in echo.count(1)] == [0]
        if one.produced and two.produced:
            return
    raise AssertionError("one instance got every call")


async def test_a_stopping_server_finishes_what_it_took(rig: Rig) -> None:
    instance = Echo()
    server = await rig.server(instance)
    echo = await rig.echo()
    answer = asyncio.ensure_future(_awaited(echo.when_told()))
    await instance.started.wait()
    stopping = asyncio.create_task(server.stop(DEADLINE_S))
    with pytest.raises(RpcError, match="cannot be called"):
        await echo.say(1)
    instance.go_on.set()
    await stopping
    assert await answer == "told"


async def test_a_stopping_server_gives_up_what_takes_too_long(rig: Rig) -> None:
    instance = Echo()
    server = await rig.server(instance)
    echo = await rig.echo()
    answer = asyncio.ensure_future(_awaited(echo.when_told()))
    await instance.started.wait()
    await server.stop(0.05)
    with pytest.raises(RpcError, match=r"Echo\.when_told failed: its process is stopping"):
        await answer
    assert server.calls == 0


async def scripted(rig: Rig, *frames: Frame | bytes) -> None:
    """A server that answers a call of Echo.say with just these frames."""
    bus = await rig.bus()

    async def on_call(message: RawMessage) -> None:
        codec.decode(message.data, Begin)
        for frame in frames:
            await bus.publish(message.reply, frame if isinstance(frame, bytes) else codec.encode(frame))

    await bus.subscribe(rig.subjects.call("Echo", "say-any"), on_call)
    await bus.flush()


ONE = msgspec.msgpack.encode(1)


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ((Taken(), Reply(1, ONE)), "replies of Echo.say-any were lost on the way"),
        ((Taken(), Reply(0, ONE), End(2)), "replies of Echo.say-any were lost on the way"),
        ((Taken(), Alive(1)), "replies of Echo.say-any were lost on the way"),
        ((Taken(), Reply(0, ONE), Reply(0, ONE)), "replies of Echo.say-any were lost on the way"),
        ((Taken(), b"garbage"), "Echo.say-any sent an answer that cannot be understood"),
        ((Taken(), NotTaken("late")), "Echo.say-any sent an answer that cannot be understood"),
        ((Reply(0, ONE),), "Echo.say-any sent an answer that cannot be understood"),
        ((Taken(), End(0)), "Echo.say-any answered with nothing where one reply was awaited"),
        ((Taken(),), "Echo.say-any fell silent; its process was probably killed"),
        ((), "Echo.say-any fell silent"),
    ],
)
async def test_a_server_that_breaks_the_protocol_fails_the_call(
    rig: Rig, frames: tuple[Frame | bytes, ...], message: str
) -> None:
    await scripted(rig, *frames)
    echo = await rig.echo()
    call = echo.say(1)
    with pytest.raises(RpcError, match=message):
        await call


async def test_a_frame_for_a_call_that_is_over_is_answered_with_a_hangup(rig: Rig) -> None:
    """The hangup that came before the server listened to it is thus made up for."""
    client = await rig.client()
    bus = await rig.bus()
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def on_control(message: RawMessage) -> None:
        heard.put_nowait(message.data)

    await bus.subscribe(rig.subjects.call_control("gone"), on_control)
    await bus.flush()
    await bus.publish(f"{client._inbox}.gone", codec.encode(Taken()))
    async with asyncio.timeout(DEADLINE_S):
        assert codec.decode(await heard.get(), Hangup) == Hangup()


async def test_a_server_that_ignores_the_window_fails_the_call_instead_of_filling_the_memory(
    rig: Rig,
) -> None:
    await scripted(rig, Taken(), *(Reply(seq, ONE) for seq in range(4 * WINDOW)))
    echo = await rig.echo()

    async def read_slowly() -> None:
        async for _ in echo.say(1):
            await asyncio.sleep(0.005)

    with pytest.raises(RpcError, match="sends more replies than it may"):
        await read_slowly()
