"""A service without a graph: says that it is ready, until it is told to end. Run as a watcher's process.

$TINY makes it misbehave: "misconfigured", "crash", "stubborn" (ignores SIGTERM), "parent" (has a child that
ignores SIGTERM and would outlive it), "slow" (never ready).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import Announcer
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.names import parse_watcher
from dynamo_local.core.subjects import Subjects
from dynamo_local.process.ancestry import die_as_environment_says
from state.machine.identity import machine_id
from state.paths import StatePaths

CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


async def main(mode: str) -> None:
    watcher = parse_watcher(os.environ["DYN_WATCHER"])
    paths = StatePaths.of(watcher.namespace, os.environ)
    lease = os.urandom(8).hex()
    bus = await Bus.connect(BusAddress.load(paths.bus_file), name=str(watcher))
    presence = Presence(
        *(str(watcher), watcher.service, "service", lease, os.getpid(), "starting", "warming up"), machine=machine_id()
    )
    announcer = Announcer(bus, Subjects(watcher.namespace), presence)
    announcing = asyncio.create_task(announcer.run())
    if mode == "parent":
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD)
        print(f"child {child.pid}", flush=True)
    if mode != "slow":
        announcer.update(state="ready", detail="")
    print(f"tiny service {watcher} runs", flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    await stop.wait()
    print(f"tiny service {watcher} ends", flush=True)
    announcing.cancel()
    await bus.close()


if __name__ == "__main__":
    die_as_environment_says()
    mode = os.environ.get("TINY", "")
    if mode == "misconfigured":
        print("error: no such model; name another", file=sys.stderr)
        sys.exit(2)
    if mode == "crash":
        sys.exit("error: cannot open the device")
    asyncio.run(main(mode))
