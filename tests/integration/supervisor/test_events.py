"""What happens to a server of mockers, as `dynamo events` tells it while the server runs and afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from components.frontend.migration.scheduler import WHY
from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus, publish_event
from dynamo_local.control.events import events_of
from dynamo_local.core.errors import NotRunningError
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.subjects import Subjects
from tests.chaos.frontend import ChaosFrontend
from tests.chaos.settings import BLOCK_SIZE
from tests.integration.server_process import PATIENCE_S, eventually
from tests.integration.supervisor.scaled_server import NAMESPACE, ScaledServer

pytestmark = pytest.mark.integration

MOCKERS = [
    f"--{service}.{option}"
    for service in ("VllmWorker", "PrefillWorker")
    for option in ("engine=mocker", "mocker-step-base-ms=10", f"mocker-block-size={BLOCK_SIZE}")
]


def events(server: ScaledServer, *arguments: str) -> list[dict[str, Any]]:
    code, out, err = server.command("events", "--json", *arguments)
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


def starts(server: ScaledServer, watcher: str) -> int:
    """Number of events of starts of a watcher: each process has one when it starts and, unless it is NATS, one when it
    is ready."""
    return sum(one.get("watcher") == f"{NAMESPACE}_{watcher}" for one in events(server, "--kind", "start"))


def follow_to_the_end(server: ScaledServer) -> list[Event]:
    """The events that the control API tells until the server has ended."""
    told: list[Event] = []
    with suppress(NotRunningError):
        for _, event in events_of(server.paths, timeout_s=10 * PATIENCE_S):
            told.append(event)
    return told


async def scale_under_load(server: ScaledServer) -> None:
    """Remove a worker while requests run on it, with a frontend that publishes its migrations as the service does."""
    bus = await Bus.connect(BusAddress.load(server.paths.bus_file), name="test")
    subjects = Subjects(NAMESPACE, FIRST_OF_MAIN)
    frontend = ChaosFrontend(bus, subjects, f"{NAMESPACE}_Frontend", stall_s=PATIENCE_S)

    def record(event: Event) -> None:
        frontend.tasks.spawn("event", publish_event(bus, subjects, event))

    frontend.dispatcher.migrations.record = record
    await frontend.start()
    frontend.open_streams(12, "events")
    try:
        async with asyncio.timeout(PATIENCE_S):
            while frontend.results.right < 12:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        code, _, err = await asyncio.to_thread(server.command, "scale", "VllmWorker=1")
        assert code == 0, err
        assert await frontend.close_streams(PATIENCE_S) == 0
        await bus.flush()
    finally:
        await frontend.tasks.close()
        await bus.close()


async def test_deaths_scalings_migrations_and_the_servers_own_life_are_told_with_reasons(tmp_path: Path) -> None:
    graph = "tests.integration.supervisor.roles_graph:Front"
    with ScaledServer(tmp_path / "state", graph, *MOCKERS, "--VllmWorker.ServiceArgs.workers=2") as server:
        followed = server.begin("events", "-f", "--kind", "death")
        streamed = asyncio.create_task(asyncio.to_thread(follow_to_the_end, server))
        try:
            await scale_under_load(server)
            killed = server.pid("VllmWorker")
            os.kill(killed, signal.SIGKILL)
            eventually(lambda: starts(server, "VllmWorker") == 4, "the worker is not back")
            os.kill(server.pid("Nats"), signal.SIGKILL)
            eventually(lambda: starts(server, "Nats") == 2, "NATS is not back")
            await asyncio.to_thread(server.ends_well)
            found = events(server)
        finally:
            followed.terminate()
            seen, _ = followed.communicate(timeout=PATIENCE_S)

    # A server that closes its socket has still to say that it has stopped.
    assert json.loads(msgspec.json.encode(await streamed)) == found[:-1]

    def of(kind: str, watcher: str = "") -> list[dict[str, Any]]:
        name = f"{NAMESPACE}_{watcher}" if watcher else None
        return [one for one in found if one["kind"] == kind and one.get("watcher") == name]

    assert [one["what"] for one in of("server")] == [
        f"starting {graph}",
        "all services ready (model mocker, 2 workers, 1 prefill worker)",
        "stopping",
        "stopped",
    ]
    (scaled,) = of("scale", "VllmWorker_1")
    assert (scaled["what"].startswith("removed in "), scaled["why"]) == (True, "`dynamo scale`")
    assert len(of("drain", "VllmWorker_1")) == 1
    migrations = of("migration", "VllmWorker_1")
    migrated = [one for one in migrations if one["outcome"] == "migrated"]
    assert migrated, migrations
    assert {(one["source"], one["destination"], one["why"]) for one in migrated} == {
        (f"{NAMESPACE}_VllmWorker_1", f"{NAMESPACE}_VllmWorker", WHY["drain"])
    }
    assert all(one["gap_s"] > 0 and one["request"] for one in migrated)
    devices = [(one["what"].split()[0], one["devices"]) for one in of("device", "VllmWorker_1")]
    assert [what for what, _ in devices] == ["claimed", "freed"]
    (death,) = of("death", "VllmWorker")
    assert (death["pid"], death["exit_code"], death["why"].startswith("restart in")) == (killed, -9, True)
    assert [one["what"] for one in of("start", "Nats")] == ["started", "started"]
    told = [one["what"].split()[0] for one in of("start", "VllmWorker")]
    assert told == ["started", "ready", "started", "ready"]
    assert found == sorted(found, key=lambda one: float(one["time"]))
    assert [line.split()[1] for line in seen.splitlines()] == ["VllmWorker", "Nats"]
    for watcher in ("VllmWorker", "PrefillWorker"):
        log = server.paths.log_file(f"{NAMESPACE}_{watcher}").read_text()
        lines = [line for line in log.splitlines() if "NATS" in line]
        assert ["lost; reconnecting" in line for line in lines] in ([True], [True, False]), lines
        assert "Traceback" not in log
