"""Workers that compute nothing and tell who else is on their devices, for test_devices.py.

$WITNESSES is a folder with a lock for each device. A worker that finds it locked by one of another server says so in
`violations`. A child of each keeps lock and device for a moment longer than the worker, as an engine does that takes
its time to die.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from dynamo_local.core.names import NAMESPACE_ENV, WATCHER_ENV
from dynamo_local.sdk import Service, async_on_start, depends, service
from state.devices.allocation import DEVICES_VARIABLE

LINGERS_S = 0.5


@service(role="aggregated", resources={"gpu": 1})
class Holder(Service):
    """A worker, as far as the supervisor can see."""

    @async_on_start
    async def start(self) -> None:
        """Lock the devices' files, and have a child that does not end at once."""
        for name in os.environ[DEVICES_VARIABLE].split(","):
            lock(Path(os.environ["WITNESSES"]), name)
        leave_a_child()


def lock(folder: Path, name: str) -> None:
    """Lock a device's file for as long as this process or its child lives. Note a process of another server on it."""
    with os.fdopen(os.open(folder / name, os.O_RDWR | os.O_CREAT), "r+", closefd=False) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if (other := file.read()) != os.environ[NAMESPACE_ENV]:
                with (folder / "violations").open("a") as violations:
                    violations.write(f"{os.environ[WATCHER_ENV]} finds one of {other} on {name}\n")
        file.seek(0)
        file.write(os.environ[NAMESPACE_ENV])


def leave_a_child() -> None:
    """Fork a child that leads a session of its own, as engines do."""
    worker = os.getpid()
    if os.fork() == 0:
        os.setsid()
        while os.getppid() == worker:
            time.sleep(0.05)
        time.sleep(LINGERS_S)
        os._exit(0)


@service(role="frontend")
class Front(Service):
    """The root."""

    workers = depends(Holder)


Front.link(Holder)
