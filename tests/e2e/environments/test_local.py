"""The story on this machine."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.e2e.environments.suite import WORKERS, EnvironmentServer, Suite, Told


@pytest.fixture(scope="module")
def server(
    own_servers: None, where: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EnvironmentServer]:
    root = tmp_path_factory.mktemp("local") / "state"
    with EnvironmentServer(root, "near", *where) as server:
        server.await_ready()
        yield server
        server.signal(signal.SIGTERM)
        assert server.end() == 0, server.output
        server.assert_nothing_left()


@pytest.fixture(scope="module")
def where() -> list[str]:
    return [f"--cpu-slots={WORKERS}"]


@pytest.fixture(scope="module")
def undisturbed(server: EnvironmentServer) -> Told:
    return server.told()


class TestLocal(Suite):
    pass
