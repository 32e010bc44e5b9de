"""The planner's pulls from a real bus and a real statefile: what cannot be read is unknown, and nothing is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_local.bus.jetstream.prefill_queue import PrefillQueue, create_prefill_queue
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core import codec
from dynamo_local.core.errors import BusError, NotRunningError
from dynamo_local.core.messages.presence import Load, Presence
from dynamo_local.core.messages.work import PrefillJob
from dynamo_local.core.planning.window import QueueReading
from dynamo_local.core.subjects import Subjects
from dynamo_local.planner.metrics import FleetMetrics, Promised, StateReader
from state.paths import StatePaths
from state.statefile.model import Owner
from state.statefile.store import StateStore
from state.statefile.transitions import claim, new_state, retire
from tests.integration.fleet_of_fakes import until

pytestmark = pytest.mark.integration

TEMPLATES = {"decode": "VllmWorker", "prefill": "PrefillWorker", "router": "Router"}


@pytest.fixture
def store(tmp_path: Path, subjects: Subjects) -> StateStore:
    """Two workers, one of which leaves, and a router."""
    namespace = subjects.namespace
    state = new_state(namespace, "ipc:///nowhere", "cpu-slot", Owner(1, 1))
    state = claim(state, f"{namespace}_VllmWorker", role="decode", cmd="run", devices=[0, 1])
    state = claim(state, f"{namespace}_PrefillWorker", role="prefill", cmd="run", devices=[2])
    state = claim(state, f"{namespace}_Router", role="router", cmd="run")
    store = StateStore(StatePaths(tmp_path, namespace))
    store.create(retire(state, f"{namespace}_PrefillWorker"))
    return store


@pytest.fixture
async def watch(bus: Bus, subjects: Subjects) -> FleetWatch:
    watch = FleetWatch(bus, subjects)
    await watch.start()
    await bus.flush()
    return watch


@pytest.fixture
def metrics(bus: Bus, subjects: Subjects, watch: FleetWatch, store: StateStore) -> FleetMetrics:
    return FleetMetrics(bus, subjects, watch, StateReader(store, lambda _: 4), TEMPLATES)


async def test_workers_queue_and_devices_are_put_together(
    bus: Bus, subjects: Subjects, watch: FleetWatch, metrics: FleetMetrics
) -> None:
    await create_prefill_queue(bus, subjects)
    job = PrefillJob("j", "r", "f", 100, 3600.0)
    await PrefillQueue(bus, subjects).publish(job)
    load = Load(2, 0, 0.5, age_s=0.0)
    presence = Presence(f"{subjects.namespace}_VllmWorker", "VllmWorker", "decode", "w", 1, "ready", load=load)
    await bus.publish(subjects.presence(presence.watcher, presence.role), codec.encode(presence))
    await until(lambda: watch.view.get("w") is not None)
    found = await metrics.pull()
    assert found.workers is not None
    seen = [(one.role, one.standing, one.devices, one.reading is not None) for one in found.workers]
    assert seen == [("prefill", "retiring", 1, False), ("decode", "routable", 2, True)]
    assert (found.queue, found.devices, found.inventory) == (QueueReading(1, 0), 3, 4)
    assert found.templates == {"decode": "VllmWorker", "prefill": "PrefillWorker"}


async def test_workers_of_endpoints_are_not_the_graphs_and_their_devices_are_taken(
    bus: Bus, subjects: Subjects, watch: FleetWatch, store: StateStore
) -> None:
    promised = Promised()
    reader = StateReader(store, lambda _: 8)
    metrics = FleetMetrics(bus, subjects, watch, reader, TEMPLATES, promised)
    before = await metrics.pull()
    worker = f"{subjects.namespace}_chat@1_VllmWorker"
    store.update(lambda state: claim(state, worker, role="decode", cmd="run", devices=[4, 5]))
    after = await metrics.pull()
    assert after.workers == before.workers
    assert (before.taken, after.taken, after.devices) == (0, 2, 5)
    promised.endpoints = 3.5
    assert (await metrics.pull()).taken == 3.5, "a worker that is still to start"


async def test_a_queue_that_is_not_there_is_unknown_and_is_not_created(
    bus: Bus, subjects: Subjects, metrics: FleetMetrics
) -> None:
    assert (await metrics.pull()).queue is None
    with pytest.raises(BusError, match="no prefill queue"):
        await PrefillQueue(bus, subjects).length()


async def test_a_statefile_that_cannot_be_read_is_unknown(metrics: FleetMetrics, store: StateStore) -> None:
    store.paths.statefile.write_text("{")
    found = await metrics.pull()
    assert (found.workers, found.devices) == (None, None)


async def test_without_a_connection_nothing_is_known(bus: Bus, metrics: FleetMetrics) -> None:
    assert (await metrics.pull()).workers is not None
    await bus.close()
    found = await metrics.pull()
    assert (found.workers, found.queue) == (None, None)


async def test_a_server_that_has_ended_is_no_error_of_reading(metrics: FleetMetrics, store: StateStore) -> None:
    store.remove()
    with pytest.raises(NotRunningError):
        await metrics.pull()
