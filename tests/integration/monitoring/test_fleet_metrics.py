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
from dynamo_local.core.messages.work import PrefillJob, QueueLength
from dynamo_local.core.planning.window import Fleet
from dynamo_local.core.subjects import Subjects
from dynamo_local.planner.metrics import FrontendsWatch, ServerMetrics, StateReader
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
def metrics(bus: Bus, subjects: Subjects, watch: FleetWatch, store: StateStore) -> ServerMetrics:
    return ServerMetrics(
        bus, subjects, watch, FrontendsWatch(bus, subjects), StateReader(store, lambda _: 4), TEMPLATES
    )


async def own(metrics: ServerMetrics) -> Fleet:
    """Pull once, and return the graph's own workers."""
    main = (await metrics.pull()).main
    assert main is not None
    return main.fleet


async def test_workers_queue_and_devices_are_put_together(
    bus: Bus, subjects: Subjects, watch: FleetWatch, metrics: ServerMetrics
) -> None:
    await create_prefill_queue(bus, subjects)
    job = PrefillJob("j", "r", "f", 100, 3600.0)
    await PrefillQueue(bus, subjects).publish(job)
    load = Load(2, 0, 0.5, age_s=0.0)
    presence = Presence(f"{subjects.namespace}_VllmWorker", "VllmWorker", "decode", "w", 1, "ready", load=load)
    await bus.publish(subjects.presence(presence.watcher, presence.role), codec.encode(presence))
    await until(lambda: watch.view.get("w") is not None)
    found = await metrics.pull()
    assert found.main is not None
    fleet = found.main.fleet
    assert fleet.workers is not None
    seen = [(one.role, one.standing, one.devices, one.reading is not None) for one in fleet.workers]
    assert seen == [("prefill", "retiring", 1, False), ("decode", "routable", 2, True)]
    assert (fleet.queue, found.held, found.inventory) == (QueueLength(1, 0), 3, 4)
    assert fleet.templates == {"decode": "VllmWorker", "prefill": "PrefillWorker"}


async def test_workers_of_endpoints_are_not_the_graphs_and_their_devices_are_held(
    subjects: Subjects, metrics: ServerMetrics, store: StateStore
) -> None:
    before = await own(metrics)
    worker = f"{subjects.namespace}_chat@1_VllmWorker"
    store.update(lambda state: claim(state, worker, role="decode", cmd="run", devices=[4, 5]))
    after = await metrics.pull()
    assert after.main is not None
    assert after.main.fleet.workers == before.workers
    assert (before.devices, after.held) == (3, 5)


async def test_a_queue_that_is_not_there_is_unknown_and_is_not_created(
    bus: Bus, subjects: Subjects, metrics: ServerMetrics
) -> None:
    assert (await own(metrics)).queue is None
    with pytest.raises(BusError, match="no prefill queue"):
        await PrefillQueue(bus, subjects).length()


async def test_a_statefile_that_cannot_be_read_is_unknown(metrics: ServerMetrics, store: StateStore) -> None:
    store.paths.statefile.write_text("{")
    found = await metrics.pull()
    assert found.main is not None
    assert (found.main.fleet.workers, found.held) == (None, None)


async def test_without_a_connection_nothing_is_known(bus: Bus, metrics: ServerMetrics) -> None:
    assert (await own(metrics)).workers is not None
    await bus.close()
    found = await own(metrics)
    assert (found.workers, found.queue) == (None, None)


async def test_a_server_that_has_ended_is_no_error_of_reading(metrics: ServerMetrics, store: StateStore) -> None:
    store.remove()
    with pytest.raises(NotRunningError):
        await metrics.pull()
