"""What a running server finds of itself is asked of it; one that hangs is looked at from outside."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from dynamo_local.control.answers import Finding
from dynamo_local.control.operations import DIAGNOSE
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.messages.endpoints import Board, EndpointStatus, EndpointView
from dynamo_local.doctor.servers import check_servers, told_by_servers
from dynamo_local.supervisor.control.api import ControlApi, ControlSocket
from dynamo_local.supervisor.diagnosis import tell_findings
from state.files import make_private_directory, sockets_of
from state.locks import ServerLock
from state.paths import StatePaths


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[StatePaths]:
    """Of a server that starts, with an endpoint that has failed."""
    paths = StatePaths(tmp_path, "here")
    make_private_directory(paths.run_dir)
    broken = EndpointView(EndpointSpec(name="chat", model="m"), EndpointStatus("failed", "no weights"), 1.0, 2.0)
    paths.board_file.write_bytes(msgspec.json.encode(Board(1, (), (broken,))))
    with ServerLock(paths):
        yield paths


def servers_of(root: Path) -> tuple[dict[str, list[Finding]], list[Finding]]:
    told = told_by_servers(root)
    return told, [each for each in check_servers(root, told) if each.check != "leftovers"]


async def test_a_server_tells_of_itself_and_of_its_endpoints(paths: StatePaths) -> None:
    api = ControlApi()
    api.take({DIAGNOSE: partial(tell_findings, paths)})
    control = ControlSocket(api, sockets_of(paths).control)
    running = asyncio.create_task(control.run())
    try:
        # The first answer waits for an import, which may take longer than the doctor waits.
        while not (found := await asyncio.to_thread(servers_of, paths.root))[0]:
            pass
    finally:
        await control.close(running)
    told, shown = found
    assert [(each.check, each.level) for each in told["here"]] == [("server here", "ok"), ("endpoint chat", "warn")]
    assert shown == told["here"][:1]
    assert shown[0].found.startswith("starting (pid ")


def test_a_server_that_hangs_is_looked_at_from_outside(paths: StatePaths) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(sockets_of(paths).control))
        silent.listen()
        told, (shown,) = servers_of(paths.root)
    assert told == {}
    assert shown.found.startswith("starting (pid ")
