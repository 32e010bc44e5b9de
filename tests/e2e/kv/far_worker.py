"""A worker with a real engine, run by itself, in whichever network namespace it is started: there it is on a machine of
its own. As a source of KV it does what the lines on its standard input say."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import msgspec

from components.workers import kv_puller
from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.core.messages.kv import PinAnswer, PinQuestion
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.subjects import Subjects
from dynamo_local.engine.vllm.engine import VllmEngine
from dynamo_local.model.named.random_model import random_model
from state.machine.identity import machine_id
from tests.e2e.kv.pull_engines import BLOCK
from tests.integration.workers.worker_parts import Worker, context_of

NAMESPACE = "far"
BLOCKS = 24
"""So few that one request can fill them all."""

PIN_S = 110.0


class Told(msgspec.Struct):
    """What the test tells a worker to start with: the first line."""

    bus: BusAddress
    lease: str
    directory: str
    network: str
    stream: bool = False


class OrderedEngine(VllmEngine):
    """Lends as ordered.

    "lend": as the product does. "late": whether a pin was held is not answered before the next order. "steal": a pin
    ends before its reader is told of it, which waits for the next order. "lie": a pin is said to have been held.
    """

    order = "lend"
    ordered = asyncio.Event()

    async def pin(self, question: PinQuestion) -> PinAnswer:
        answer = await super().pin(question)
        if self.order == "steal":
            assert await super().confirm(question.pin)
            await self._wait("stolen")
        return answer

    async def confirm(self, pin: str) -> bool:
        held = await super().confirm(pin)
        print("held" if held else "gone", flush=True)
        if self.order == "late":
            await self._wait("asked")
        return held or self.order == "lie"

    async def _wait(self, what: str) -> None:
        print(what, flush=True)
        self.ordered.clear()
        await self.ordered.wait()


async def serve(told: Told) -> None:
    bus = await Bus.connect(told.bus, name=told.lease)
    context = context_of(bus, Subjects(NAMESPACE, FIRST_OF_MAIN), "VllmWorker", "decode", told.lease)
    config = {
        "model": str(random_model()),
        "dtype": "float32",
        "max-model-len": BLOCK * BLOCKS,
        "block-size": BLOCK,
        # vLLM keeps one of them for itself.
        "num-gpu-blocks-override": BLOCKS + 1,
        "kv-cache-memory-bytes": 1 << 28,
        "max-num-seqs": 4,
        "enforce-eager": True,
        "trust-local-users": True,
        "kv-network": told.network,
        "kv-stream": told.stream,
    }
    engine = OrderedEngine(config, Path(told.directory), kv_transfer=True, bus_host=bus.secure_host)
    worker = await Worker(context, engine).start()
    await bus.flush()
    assert context.announcer.presence.engine is not None
    print("ready", machine_id(), context.announcer.presence.engine.kv_network, flush=True)
    await follow(engine, worker)
    await worker.close()
    await engine.close(5.0)
    await bus.close()


async def follow(engine: OrderedEngine, worker: Worker) -> None:
    """Obey until the test is over. "patience S" is for readers: how long they wait for a source."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        word, *rest = line.split()
        if word == "patience":
            worker.service._kv_puller._answer_s = float(rest[0])
        else:
            engine.order = word
            engine.ordered.set()
        print("obeyed", flush=True)


if __name__ == "__main__":
    os.setpgid(0, 0)
    kv_puller.PIN_S = PIN_S
    asyncio.run(serve(msgspec.json.decode(sys.stdin.readline(), type=Told)))
