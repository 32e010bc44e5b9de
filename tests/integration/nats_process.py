"""A real NATS server for tests: on a port that it chooses itself, with a token, in a directory of its own."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dynamo_local.runtime.bus import BusAddress
from dynamo_local.supervisor.nats_server import NatsServer, find_binary

_DEADLINE_S = 20.0


@contextmanager
def running_nats(directory: Path) -> Iterator[BusAddress]:
    """Start a server, wait until it says where it listens, and end it afterwards."""
    server = NatsServer.at(directory)
    server.write_files()
    log = directory / "nats.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(find_binary()), "--config", str(server.config_path)], stdout=output, stderr=output
        )
    try:
        yield _listening(server, process, log)
    finally:
        process.terminate()
        process.wait(_DEADLINE_S)


def _listening(server: NatsServer, process: subprocess.Popen[bytes], log: Path) -> BusAddress:
    deadline = time.monotonic() + _DEADLINE_S
    while time.monotonic() < deadline:
        chosen = server.with_chosen_port(process.pid)
        if chosen is not None:
            return chosen.address
        if process.poll() is not None:
            break
        time.sleep(0.01)
    raise AssertionError(f"NATS did not start: {log.read_text()}")
