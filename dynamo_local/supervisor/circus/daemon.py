"""circusd as a child of `dynamo serve`, in a session of its own. It dies with its parent; its own children outlive
it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dynamo_local.process.endings import ended
from dynamo_local.supervisor.circus.ahead import CircusAhead
from dynamo_local.supervisor.server.private_files import open_log, write_private

CHECK_DELAY_S = 5.0
"""Interval at which circusd looks for processes that ended. It also looks whenever one ends (circusd.py)."""


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

    def __init__(self, process: subprocess.Popen[bytes], files: CircusFiles) -> None:
        self._process = process
        self.files = files

    @classmethod
    def spawn(
        cls, files: CircusFiles, environment: Mapping[str, str], ahead: CircusAhead | None = None
    ) -> CircusDaemon:
        """Start circusd, or have the one run that was started ahead. Call on the main thread: circusd dies with the
        thread that forks it."""
        write_private(files.config, _CONFIG.encode())
        open_log(files.log).close()
        ahead = ahead or CircusAhead.launch(environment)
        ahead.begin(
            files.config,
            files.log,
            {**environment, _ENDPOINT_ENV: files.endpoint, _PUBSUB_ENV: files.pubsub_endpoint},
        )
        return cls(ahead.process, files)

    @property
    def pid(self) -> int:
        """The pid of circusd, which is the parent of the watchers' processes."""
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    async def wait(self) -> str:
        """Wait until circusd has ended. Returns the way it ended, in words."""
        if self.running:
            await ended(self.pid)
        return describe_exit(self._process.wait())

    async def end(self, deadline_s: float) -> None:
        """Wait for circusd to end; kill it at the deadline."""
        try:
            async with asyncio.timeout(deadline_s):
                await self.wait()
        except TimeoutError:
            self.kill()
            await self.wait()

    def kill(self) -> None:
        """SIGKILL circusd. Harmless when it is gone."""
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
