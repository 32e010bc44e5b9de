"""A real NATS server for tests: on a port that it chooses itself, with a token, in a directory of its own."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dynamo_local.bus.address import BusAddress
from dynamo_local.supervisor.server.launch.plan import LOOPBACK
from dynamo_local.supervisor.server.nats.nats_server import NatsServer, find_binary

_DEADLINE_S = 60.0


class NatsProcess:
    """A server that can be killed and started again where it was."""

    def __init__(self, directory: Path, host: str = LOOPBACK) -> None:
        self._server = NatsServer.at(directory, host)
        self._server.write_files()
        self._log = directory / "nats.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def settings(self) -> NatsServer:
        return self._server

    @property
    def address(self) -> BusAddress:
        return self._server.address

    def start(self) -> None:
        """Start it, and wait until it says where it listens."""
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [str(find_binary()), "--config", str(self._server.config_path)], stdout=output, stderr=output
            )
        self._server = self._listening(self._process)

    def change(self, settings: NatsServer) -> None:
        """Have it go by other settings, while it runs or from its next start on."""
        self._server = settings
        self._server.write_files()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        """Like a crash."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(_DEADLINE_S)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def end(self) -> None:
        """Harmless if it has ended already."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(_DEADLINE_S)

    def _listening(self, process: subprocess.Popen[bytes]) -> NatsServer:
        deadline = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline:
            chosen = self._server.with_chosen_port(process.pid)
            if chosen is not None:
                return chosen
            if process.poll() is not None:
                break
            time.sleep(0.01)
        raise AssertionError(f"NATS did not start: {self._log.read_text()}")


@contextmanager
def running_nats(directory: Path) -> Iterator[BusAddress]:
    """A server for as long as the context lasts."""
    server = NatsProcess(directory)
    try:
        server.start()
        yield server.address
    finally:
        server.end()
