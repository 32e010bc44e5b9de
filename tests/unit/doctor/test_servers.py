"""What `dynamo doctor` finds of registries of endpoints, and what running servers tell of themselves; one that hangs is
looked at from outside."""

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
from dynamo_local.core.endpoints.registry import Registry
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.messages.endpoints import Board, EndpointStatus, EndpointView
from dynamo_local.doctor.servers import check_endpoints, check_servers, close_registries, told_by_servers
from dynamo_local.supervisor.control.api import ControlApi, ControlSocket
from dynamo_local.supervisor.diagnosis import tell_findings
from state.endpoints.registry import RegistryStore
from state.files import make_private_directory, sockets_of
from state.locks import ServerLock
from state.paths import StatePaths


@pytest.fixture
def paths(tmp_path: Path) -> StatePaths:
    """A namespace with a registry, whose server does not run."""
    paths = StatePaths(tmp_path, "here")
    with ServerLock(paths) as lock:
        RegistryStore(lock).write(Registry())
    return paths


def levels(root: Path) -> list[tuple[str, str, str]]:
    return [(finding.check, finding.level, finding.found) for finding in check_endpoints(root, {})]


def test_a_whole_registry_is_well(paths: StatePaths) -> None:
    assert levels(paths.root) == [("endpoints here", "ok", "0 in the registry")]


def test_a_namespace_without_a_registry_is_not_spoken_of(tmp_path: Path) -> None:
    (tmp_path / "there.lock").touch()
    assert levels(tmp_path) == []


def test_a_damaged_file_is_named_while_the_other_one_is_whole(paths: StatePaths) -> None:
    paths.registry_file.write_bytes(paths.registry_file.read_bytes()[:-3])
    ((check, level, found),) = levels(paths.root)
    assert (check, level) == ("endpoints here", "warn")
    assert found.startswith(f"{paths.registry_file} is damaged (")
    paths.registry_file.unlink()
    ((_, level, found),) = levels(paths.root)
    assert (level, found.startswith(f"{paths.registry_file} cannot be read")) == ("warn", True)


def test_a_registry_that_cannot_be_read_fails_with_its_remedy(paths: StatePaths) -> None:
    for path in (paths.registry_file, paths.registry_copy):
        path.write_text("{}")
    (finding,) = check_endpoints(paths.root, {})
    assert finding.level == "fail"
    assert "cannot be read" in finding.found
    assert "--forget" in finding.remedy


def test_files_that_others_can_open_are_found_and_closed(paths: StatePaths) -> None:
    paths.registry_copy.chmod(0o640)
    assert levels(paths.root) == [("endpoints here", "warn", f"other users can open {paths.registry_copy}")]
    assert close_registries(paths.root) == [f"closed {paths.registry_copy} to other users"]
    assert paths.registry_copy.stat().st_mode & 0o777 == 0o600
    assert close_registries(paths.root) == []


def test_failed_endpoints_of_a_running_server_are_told_with_their_reasons(paths: StatePaths) -> None:
    broken = EndpointView(EndpointSpec(name="chat", model="m"), EndpointStatus("failed", "no weights"), 1.0, 2.0)
    paths.run_dir.mkdir()
    paths.board_file.write_bytes(msgspec.json.encode(Board(1, (), (broken,))))
    assert levels(paths.root) == [("endpoints here", "ok", "0 in the registry")]
    with ServerLock(paths):
        _, failed = check_endpoints(paths.root, {})
    assert (failed.check, failed.level, failed.found) == ("endpoint chat", "warn", "has failed: no weights")
    assert failed.remedy == "`dynamo endpoint update chat --namespace here` changes it"


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[StatePaths]:
    """Of a server that starts, with an endpoint that has failed."""
    starting = StatePaths(tmp_path, "here")
    make_private_directory(starting.run_dir)
    broken = EndpointView(EndpointSpec(name="chat", model="m"), EndpointStatus("failed", "no weights"), 1.0, 2.0)
    starting.board_file.write_bytes(msgspec.json.encode(Board(1, (), (broken,))))
    with ServerLock(starting):
        yield starting


def servers_of(root: Path) -> tuple[dict[str, list[Finding]], list[Finding]]:
    told = told_by_servers(root)
    return told, [each for each in check_servers(root, told) if each.check != "leftovers"]


async def test_a_server_tells_of_itself_and_of_its_endpoints(starting: StatePaths) -> None:
    api = ControlApi()
    api.take({DIAGNOSE: partial(tell_findings, starting)})
    control = ControlSocket(api, sockets_of(starting).control)
    running = asyncio.create_task(control.run())
    try:
        # The first answer waits for an import, which may take longer than the doctor waits.
        while not (found := await asyncio.to_thread(servers_of, starting.root))[0]:
            pass
    finally:
        await control.close(running)
    told, shown = found
    assert [(each.check, each.level) for each in told["here"]] == [("server here", "ok"), ("endpoint chat", "warn")]
    assert shown == told["here"][:1]
    assert shown[0].found.startswith("starting (pid ")


def test_a_server_that_hangs_is_looked_at_from_outside(starting: StatePaths) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(sockets_of(starting).control))
        silent.listen()
        told, (shown,) = servers_of(starting.root)
    assert told == {}
    assert shown.found.startswith("starting (pid ")
