"""circusd as a child of `dynamo serve`, in a session of its own. It dies with its parent; its own children outlive
it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dynamo_local.process.ancestry import PARENT_PID_ENV
from dynamo_local.supervisor.server.private_files import open_log, write_private

CHECK_DELAY_S = 5.0
"""Interval at which circusd looks for processes that ended. It also looks whenever one ends (child_ends.py)."""

_NOT_FOR_CHILDREN = ("NATS_SERVER", "NATS_TOKEN")
"""Environment variables that may hold a secret. Services do not need them: they read the address from bus.json."""


@dataclass(frozen=True)
class CircusFiles:
    """The files of one circusd. `endpoint` and `pubsub_endpoint` are ipc:// URLs, in directories of mode 0700."""

    endpoint: str
    pubsub_endpoint: str
    config: Path
    log: Path

    def of_next(self) -> CircusFiles:
        """The files of a replacement, which listens beside the endpoints until it has taken over."""
        return replace(self, endpoint=f"{self.endpoint}{_NEXT}", pubsub_endpoint=f"{self.pubsub_endpoint}{_NEXT}")

    def put_next_in_place(self) -> None:
        """Move the replacement's sockets to the endpoints, where clients find them."""
        for endpoint in (self.pubsub_endpoint, self.endpoint):
            path = Path(endpoint.removeprefix(_IPC))
            path.with_name(f"{path.name}{_NEXT}").replace(path)


_IPC = "ipc://"
_NEXT = ".new"

_ENDPOINT_ENV = "DYN_CIRCUS_ENDPOINT"
"""Set by the server in circusd: socket for commands."""

_PUBSUB_ENV = "DYN_CIRCUS_PUBSUB"
"""Set by the server in circusd: socket for events."""

# Paths come by the environment: circus's configuration cannot quote, and cuts a value at " ;". circusd listens on the
# two sockets only; without the empty multicast endpoint it would answer anybody on the network.
_CONFIG = f"""\
[circus]
endpoint = $(circus.env.{_ENDPOINT_ENV})
pubsub_endpoint = $(circus.env.{_PUBSUB_ENV})
multicast_endpoint =
statsd = False
httpd = False
check_delay = {CHECK_DELAY_S}
loglevel = WARNING
"""


class CircusDaemon:
    """A running circusd."""

    def __init__(self, process: asyncio.subprocess.Process, files: CircusFiles) -> None:
        self._process = process
        self.files = files

    @classmethod
    async def spawn(cls, files: CircusFiles, environment: Mapping[str, str]) -> CircusDaemon:
        """Start circusd. Call on the main thread: circusd dies with the thread that forks it."""
        write_private(files.config, _CONFIG.encode())
        inherited = {name: value for name, value in environment.items() if name not in _NOT_FOR_CHILDREN}
        inherited |= {
            PARENT_PID_ENV: str(os.getpid()),
            _ENDPOINT_ENV: files.endpoint,
            _PUBSUB_ENV: files.pubsub_endpoint,
        }
        command = (sys.executable, "-m", "dynamo_local.supervisor.circus.circusd", str(files.config))
        with open_log(files.log) as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "dynamo_local.process.guarded", "--", *command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=inherited,
                start_new_session=True,
            )
        return cls(process, files)

    @property
    def pid(self) -> int:
        """The pid of circusd, which is the parent of the watchers' processes."""
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> str:
        """Wait until circusd has ended. Returns the way it ended, in words."""
        return describe_exit(await self._process.wait())

    async def end(self, deadline_s: float) -> None:
        """Wait for circusd to end; kill it at the deadline."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """SIGKILL circusd. Harmless when it is gone."""
        with suppress(ProcessLookupError):
            self._process.kill()


def describe_exit(code: int | None) -> str:
    """A process's end in words: "exit code 1", "killed by SIGKILL"."""
    if code is None:
        return "exit code not known"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
