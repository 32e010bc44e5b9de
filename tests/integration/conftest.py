"""One NATS server for all tests; each test has a namespace of its own on it, and connections that are closed."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from components.frontend.placing import LocalAssigner, RouterAssigner
from components.frontend.prefill import PrefillDeadlines
from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.jetstream.prefill_queue import LIMITS, PrefillQueue, create_prefill_queue
from dynamo_local.bus.jetstream.streams import QueueLimits
from dynamo_local.bus.nats import Bus
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.request.recovery import RecoveryDeadlines
from dynamo_local.core.subjects import Subjects
from tests.integration.disaggregation.prefill_fakes import ENDLESS, Disaggregated, FakePrefillWorker, remote_prefill
from tests.integration.fleet_of_fakes import PATIENT, FakeFrontend, FakeWorker
from tests.integration.nats_process import NatsProcess, running_nats
from tests.integration.server_process import IMPORTED_ANEW

_numbers = itertools.count(1)

Connect = Callable[[], Awaitable[Bus]]
StartWorker = Callable[[str], Awaitable[FakeWorker]]


@pytest.fixture(scope="session", autouse=True)
def forked_servers() -> Iterator[None]:
    """What tests leave in the environment is no reason to import vLLM anew: that takes 17 s of a core, unseen."""
    yield
    assert IMPORTED_ANEW == []


@pytest.fixture(scope="session")
def nats_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BusAddress]:
    with running_nats(tmp_path_factory.mktemp("nats")) as address:
        yield address


@pytest.fixture
def subjects() -> Subjects:
    """Of a namespace that no other test uses."""
    return Subjects(f"test-{next(_numbers)}", FIRST_OF_MAIN)


@pytest.fixture
async def connect(nats_address: BusAddress) -> AsyncIterator[Connect]:
    """Opens connections, as many processes would."""
    opened: list[Bus] = []

    async def open_one() -> Bus:
        opened.append(await Bus.connect(nats_address, name=f"test {len(opened)}"))
        return opened[-1]

    yield open_one
    for bus in opened:
        await bus.close()


@pytest.fixture
async def bus(connect: Connect) -> Bus:
    return await connect()


@pytest.fixture
def own_nats(tmp_path: Path) -> Iterator[NatsProcess]:
    """A server of the test's own, to be killed and started again."""
    server = NatsProcess(tmp_path)
    server.start()
    yield server
    server.end()


@pytest.fixture
async def frontend(connect: Connect, subjects: Subjects) -> AsyncIterator[FakeFrontend]:
    frontend = await FakeFrontend(await connect(), subjects).start()
    yield frontend
    await frontend.close()


@pytest.fixture
async def start_worker(bus: Bus, subjects: Subjects) -> StartWorker:
    async def start(lease: str) -> FakeWorker:
        return await FakeWorker(bus, subjects, lease).start()

    return start


@pytest.fixture
async def pair(frontend: FakeFrontend, start_worker: StartWorker) -> tuple[FakeWorker, FakeWorker]:
    """Two workers that the frontend knows. The first request goes to the first."""
    workers = await start_worker("a"), await start_worker("b")
    await frontend.knows(*workers)
    return workers


class Disaggregate(Protocol):
    """Starts a frontend with a queue, and no workers."""

    async def __call__(
        self,
        *,
        deadlines: PrefillDeadlines = ENDLESS,
        queue: QueueLimits = LIMITS,
        frontend: RecoveryDeadlines = PATIENT,
    ) -> Disaggregated: ...


@pytest.fixture
async def disaggregate(connect: Connect, subjects: Subjects, bus: Bus) -> AsyncIterator[Disaggregate]:
    started: list[Disaggregated] = []

    async def start(
        *, deadlines: PrefillDeadlines = ENDLESS, queue: QueueLimits = LIMITS, frontend: RecoveryDeadlines = PATIENT
    ) -> Disaggregated:
        await create_prefill_queue(bus, subjects, queue)
        remote = remote_prefill(deadlines)
        made = await FakeFrontend(await connect(), subjects, deadlines=frontend, remote_of=remote).start()
        started.append(Disaggregated(made, PrefillQueue(bus, subjects), bus))
        return started[-1]

    yield start
    for fleet in started:
        await fleet.close()


@pytest.fixture
async def fleet(disaggregate: Disaggregate) -> Disaggregated:
    """A frontend with a queue, and no workers yet."""
    return await disaggregate()


@pytest.fixture
async def decode(fleet: Disaggregated) -> FakeWorker:
    return await fleet.decode_worker("d")


@pytest.fixture
async def prefill(fleet: Disaggregated) -> FakePrefillWorker:
    return await fleet.prefill_worker("p")


@pytest.fixture
async def routed(connect: Connect, subjects: Subjects) -> AsyncIterator[FakeFrontend]:
    """A frontend that asks a router."""

    def by_router(frontend: FakeFrontend, local: LocalAssigner) -> RouterAssigner:
        return RouterAssigner(frontend.bus, frontend.subjects, frontend.lease, local)

    frontend = await FakeFrontend(await connect(), subjects, assigner_of=by_router).start()
    yield frontend
    await frontend.close()
