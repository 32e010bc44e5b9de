"""`python -m benchmarks.scale.announcers WORKERS`: processes of a fleet that announce themselves, all in this one.

Reads the address of NATS from standard input, says `ready` on standard output, and ends at the end of its input. Every
worker's load changes at every beat, as that of one that serves.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import msgspec
import uvloop

from benchmarks.harness.servers import NAMESPACE
from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import Announcer
from dynamo_local.core.beats import BEAT_S
from dynamo_local.core.messages.presence import Counts, EngineInfo, Load, Presence
from dynamo_local.core.subjects import Subjects
from dynamo_local.tasks import TaskGuard

FRONTENDS = 4
_CONNECTIONS = 8
_NO_PROCESS = 2**22
"""A pid that no process has: nobody looks at it for CPU time."""


def fleet(workers: int) -> tuple[Presence, ...]:
    """The presences of a graph with so many workers and a few frontends."""
    engine = EngineInfo("VllmEngine", "model", 32_768, 16, 20_000, 256, block_bytes=2**19, kv_events=True)
    return (
        *(_presence("VllmWorker", "aggregated", number, engine) for number in range(workers)),
        *(_presence("Frontend", "frontend", number, None) for number in range(FRONTENDS)),
    )


def _presence(service: str, role: str, number: int, engine: EngineInfo | None) -> Presence:
    watcher = f"{NAMESPACE}_{service}_{number}" if number else f"{NAMESPACE}_{service}"
    return Presence(watcher, service, role, f"{role[0]}{number:015x}", _NO_PROCESS, "ready", engine=engine)


async def _run(workers: int) -> None:
    address = msgspec.json.decode(sys.stdin.buffer.readline(), type=BusAddress)
    buses = [await Bus.connect(address, name=f"workers {number}") for number in range(_CONNECTIONS)]
    tasks, subjects = TaskGuard(), Subjects(NAMESPACE)
    announcers = [
        Announcer(buses[number % len(buses)], subjects, presence) for number, presence in enumerate(fleet(workers))
    ]
    for announcer in announcers:
        tasks.spawn("presence", announcer.run())
    tasks.spawn("loads", _serve(announcers))
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.buffer.read)
    await tasks.close()
    for bus in buses:
        await bus.close()


async def _serve(announcers: Sequence[Announcer]) -> None:
    turn = 0
    while True:
        turn += 1
        for number, announcer in enumerate(announcers):
            seen = turn + number
            announcer.note(
                load=Load(running=seen % 200, waiting=seen % 7, kv_usage=seen % 100 / 100, head_tokens=0),
                counts=Counts(requests=seen, prompt_tokens=1_000 * seen, output_tokens=100 * seen, prefill_s=seen / 9),
            )
        await asyncio.sleep(BEAT_S)


if __name__ == "__main__":
    uvloop.run(_run(int(sys.argv[1])))
