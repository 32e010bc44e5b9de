"""Connections that change to another token while they are in use, on a real NATS server."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus, BusPart, RawMessage, follow_address
from dynamo_local.core import codec
from dynamo_local.core.errors import BusError, BusRefusedError
from dynamo_local.core.messages.admin import AddressChanged, AddressTaken
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.server.nats.nats_server import write_bus_address
from tests.integration.nats_process import NatsProcess

pytestmark = pytest.mark.integration
DEADLINE_S = 60.0


class Scene:
    """A NATS server, the file of its address, and connections that read it."""

    def __init__(self, nats: NatsProcess, file: Path, stack: AsyncExitStack) -> None:
        self.nats = nats
        self.file = file
        self._stack = stack
        write_bus_address(file, nats.address)

    async def connect(self, name: str, address: BusAddress | None = None) -> Bus:
        bus = await Bus.connect(address or self.nats.address, name=name, file=self.file)
        self._stack.push_async_callback(bus.close)
        return bus

    async def two_tokens(self) -> BusAddress:
        """Have NATS take one more token, which is in the file then. Returns the former address."""
        former = self.nats.address
        self.nats.change(self.nats.settings.with_new_token())
        await self.until_taken(self.nats.address)
        write_bus_address(self.file, self.nats.address)
        return former

    def end_former(self) -> None:
        self.nats.change(self.nats.settings.without_former())

    async def until_taken(self, address: BusAddress) -> None:
        await until(lambda: takes(address))

    async def until_refused(self, address: BusAddress) -> None:
        await until(lambda: refuses(address))


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def refuses(address: BusAddress) -> bool:
    return not await takes(address)


async def works(bus: Bus) -> bool:
    try:
        await bus.flush()
    except BusError:
        return False
    return True


async def takes(address: BusAddress) -> bool:
    try:
        bus = await Bus.connect(address, name="probe", deadline_s=5)
    except BusRefusedError:
        return False
    await bus.close()
    return True


@pytest.fixture
async def scene(own_nats: NatsProcess, tmp_path: Path) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        yield Scene(own_nats, tmp_path / "bus.json", stack)


async def test_not_one_request_is_lost_when_both_sides_change(scene: Scene, subjects: Subjects) -> None:
    asking, answering = await scene.connect("asking"), await scene.connect("answering")
    heard: Counter[bytes] = Counter()

    async def echo(message: RawMessage) -> None:
        heard[message.data] += 1
        await answering.publish(message.reply, message.data)

    await answering.subscribe(subjects.probe, echo)
    await answering.flush()
    ended, part = asyncio.Event(), BusPart(asking)

    async def ask_on(name: int) -> int:
        asked = 0
        while not ended.is_set():
            data = b"%d-%d" % (name, asked)
            assert await part.request(subjects.probe, data, timeout_s=DEADLINE_S) == data
            asked += 1
        return asked

    askers = [asyncio.create_task(ask_on(name)) for name in range(8)]
    for _ in range(2):
        former = await scene.two_tokens()
        for bus in (asking, answering) * 2:
            assert await bus.renew() == scene.nats.address.user
        scene.end_former()
        await scene.until_refused(former)
        wanted = heard.total() + 80

        async def went_on(wanted: int = wanted) -> bool:
            return heard.total() >= wanted

        await until(went_on)
    ended.set()
    assert sum(await asyncio.gather(*askers)) == heard.total()
    assert set(heard.values()) == {1}


async def test_who_has_heard_of_nothing_is_disconnected_and_comes_back(
    scene: Scene, subjects: Subjects, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    late, other = await scene.connect("late"), await scene.connect("other")
    arrived = asyncio.Event()

    async def on_message(_: RawMessage) -> None:
        arrived.set()

    await late.subscribe(subjects.probe, on_message)
    former = await scene.two_tokens()
    await other.renew()
    scene.end_former()
    await scene.until_refused(former)
    async with asyncio.timeout(DEADLINE_S):
        while not arrived.is_set():
            await other.publish(subjects.probe, b"")
            await asyncio.sleep(0.01)
    assert await late.renew() == scene.nats.address.user
    assert scene.nats.address.token is not None
    assert scene.nats.address.token not in caplog.text


async def test_who_starts_with_an_address_that_has_just_ended_reads_the_new_one(scene: Scene) -> None:
    former = await scene.two_tokens()
    scene.end_former()
    await scene.until_refused(former)
    assert (await scene.connect("late", former)).connected
    with pytest.raises(BusRefusedError, match="refuses the token"):
        await Bus.connect(former, name="stranger")


async def test_processes_change_when_they_are_told_and_say_so(scene: Scene, subjects: Subjects) -> None:
    server, process = await scene.connect("server"), await scene.connect("process")
    await follow_address(process, subjects, "lease")
    await process.flush()
    change = codec.encode(AddressChanged())
    for _ in range(2):
        answer = await server.request(subjects.address_changes, change, timeout_s=DEADLINE_S)
        assert codec.decode(answer, AddressTaken) == AddressTaken("lease", scene.nats.address.user)
        await scene.two_tokens()
        await server.renew()


async def test_a_server_killed_between_two_steps_comes_back_with_a_token_that_processes_have(
    scene: Scene,
) -> None:
    bus = await scene.connect("process")
    await scene.two_tokens()
    for step in (bus.renew, None):
        scene.nats.kill()
        renewing = asyncio.create_task(step()) if step is not None else None
        if step is None:
            scene.end_former()
        scene.nats.start()
        if renewing is not None:
            await asyncio.wait_for(renewing, DEADLINE_S)
        await until(lambda: works(bus))
    assert await bus.renew() == scene.nats.address.user


async def test_an_address_that_cannot_be_read_changes_nothing(scene: Scene) -> None:
    bus = await scene.connect("process")
    user = scene.nats.address.user
    for damage in (lambda: scene.file.write_text(""), scene.file.unlink):
        damage()
        assert await bus.renew() == user
        await bus.flush()


async def test_a_connection_that_is_lost_as_it_changes_hears_everything_again(scene: Scene, subjects: Subjects) -> None:
    """The notice of the change and the end of the connection are read at the same time."""
    late, other = await scene.connect("late"), await scene.connect("other")
    heard = asyncio.Event()

    async def on_message(_: RawMessage) -> None:
        heard.set()

    await late.subscribe(subjects.probe, on_message)
    await scene.two_tokens()
    await other.renew()
    scene.end_former()
    await late.renew()

    async def is_heard() -> bool:
        await other.publish(subjects.probe, b"")
        return heard.is_set()

    await until(is_heard)
