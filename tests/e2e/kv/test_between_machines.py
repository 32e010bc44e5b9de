"""KV that is read between two machines, each a network namespace, by two workers with real engines: the tokens are
those of the source, whatever it does to the blocks and whenever it dies."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from benchmarks.harness.relay import Conditions
from benchmarks.harness.two_machines import TwoMachines, two_machines, why_not
from dynamo_local.bus.nats import Bus
from dynamo_local.core import codec
from dynamo_local.core.messages.kv import TLS_STREAM
from dynamo_local.core.messages.presence import LeaseLost
from dynamo_local.core.messages.work import Cancel, MigrationAnswer, RequestEpoch, Reserve, Submit, TokenBatch, Warm
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.subjects import Subjects
from tests.e2e.kv.agent_source import PIECE, SAID
from tests.e2e.kv.far_worker import BLOCKS, NAMESPACE, PIN_S, Told
from tests.e2e.kv.pull_engines import BLOCK, PATIENCE_S, prompt_of
from tests.integration.nats_process import NatsProcess

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = pytest.mark.asyncio(loop_scope="module")

FULL = 11
"""Blocks of a prompt: as many as a source lends of so few."""
LENGTH = FULL * BLOCK + 1
COUNT = 8
SHORT_S = 3.0
FRONTEND = "f"
OF_STREAMS = "s"
"""Frontends, each with two workers of its own, at the same time."""


@dataclass
class FarWorker:
    """A worker process."""

    lease: str
    process: subprocess.Popen[str]
    machine: str = ""
    network: str = ""

    def line(self, begins: str) -> str:
        """The next line that it prints which begins so."""
        assert self.process.stdout is not None
        while text := self.process.stdout.readline():
            if text.startswith(begins):
                return text
        raise AssertionError(f"worker {self.lease} has ended")

    async def until(self, begins: str) -> str:
        return await asyncio.wait_for(asyncio.to_thread(self.line, begins), PATIENCE_S)

    async def order(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        await self.until("obeyed")

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(PATIENCE_S)
        finally:
            self.kill()


@dataclass
class Answer:
    """Output of a request so far."""

    tokens: list[int] = field(default_factory=list)
    cached: int | None = None
    finish: str | None = None
    first: int | None = None


@dataclass
class Frontend:
    """Two workers, and what they answer."""

    bus: Bus
    source: FarWorker
    reader: FarWorker
    name: str
    answers: dict[str, Answer] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    subjects: Subjects = field(default_factory=lambda: Subjects(NAMESPACE, FIRST_OF_MAIN))

    async def listen(self) -> None:
        await self.bus.listen(self.subjects.tokens(self.name), TokenBatch, self._hear)
        await self.bus.flush()

    async def submit(
        self, worker: FarWorker, prompt: list[int], source: str | None = None, count: int = COUNT, hold_s: float = 0.0
    ) -> str:
        return await self.assign(worker, f"r{len(self.answers)}", 1, prompt, count, source=source, hold_s=hold_s)

    async def assign(
        self, worker: FarWorker, request_id: str, epoch: int, tokens: list[int], count: int, **how: Any
    ) -> str:
        """Have a worker continue from `tokens`. Returns the name of its answer."""
        name = str(RequestEpoch(request_id, epoch))
        self.answers[name] = Answer()
        sampling = msgspec.msgpack.encode({"max_tokens": count, "temperature": 0.0, "ignore_eos": True})
        work = Submit(request_id, epoch, self.name, tokens, msgspec.Raw(sampling), **how)
        await self.bus.send(self.subjects.work(worker.lease), work)
        return name

    async def answer(self, name: str) -> Answer:
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(lambda: self.answers[name].finish is not None)
        assert self.answers[name].finish == "length"
        return self.answers[name]

    async def migrate(self, request: Reserve | Warm) -> int:
        """Have the reader prepare a migration. Returns how many tokens it has pulled."""
        subject = self.subjects.migrations(self.reader.lease)
        answer = await self.bus.ask(subject, request, MigrationAnswer, timeout_s=PATIENCE_S)
        assert answer.refused is None
        return answer.pulled_tokens

    async def so_far(self, name: str, at_least: int) -> list[int]:
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(lambda: len(self.answers[name].tokens) >= at_least)
        return list(self.answers[name].tokens)

    async def compute(self, prompt: list[int]) -> list[int]:
        """The tokens that the source has computed itself."""
        return (await self.answer(await self.submit(self.source, prompt))).tokens

    async def pull(self, prompt: list[int]) -> str:
        return await self.submit(self.reader, prompt, self.source.lease)

    async def overwrite(self, seed: int) -> None:
        """Have the source fill all its blocks with something else."""
        await self.answer(await self.submit(self.source, prompt_of(BLOCK * (BLOCKS - 1), seed), count=1))

    async def _hear(self, batch: TokenBatch) -> None:
        async with self.changed:
            for delta in batch.deltas:
                answer = self.answers[str(RequestEpoch(delta.request_id, delta.epoch))]
                # Positions count from the request's first token, and each epoch begins elsewhere.
                answer.first = delta.position if answer.first is None else answer.first
                if delta.position - answer.first == len(answer.tokens):
                    answer.tokens += delta.token_ids
                answer.cached = delta.cached_tokens if answer.cached is None else answer.cached
                answer.finish = delta.finish or answer.finish
            self.changed.notify_all()


@dataclass
class AgentReader:
    """A process that reads (agent_reader.py)."""

    process: subprocess.Popen[str]

    async def until(self, begins: str) -> str:
        return await asyncio.wait_for(asyncio.to_thread(self._line, begins), PATIENCE_S)

    def ask(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def _line(self, begins: str) -> str:
        assert self.process.stdout is not None
        return next(line for line in self.process.stdout if line.startswith(begins))


@contextmanager
def agents_on(machines: TwoMachines, kind: str) -> Iterator[AgentReader]:
    """An agent of this kind on the second machine, which reads from one on the first."""
    (near, far), (here, there) = machines.names, machines.addresses

    def opened(name: str, module: str, *arguments: str) -> subprocess.Popen[str]:
        command = machines.command(name, sys.executable, "-m", f"tests.e2e.kv.{module}", kind, *arguments)
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with opened(near, "agent_source", str(PIECE), "inner0", here) as source:
        assert source.stdout is not None
        metadata, address = next(line for line in source.stdout if re.fullmatch(SAID, line)).split()
        where = (metadata, address, str(PIECE), "inner0", there)
        with opened(far, "agent_reader", *where) as reader:
            yield AgentReader(reader)
            reader.kill()
        source.kill()


@pytest.fixture(scope="module")
def machines() -> Iterator[TwoMachines]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with two_machines() as machines:
        yield machines


@pytest.fixture(scope="module")
def nats(machines: TwoMachines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsProcess]:
    server = NatsProcess(tmp_path_factory.mktemp("nats"), machines.here)
    server.start()
    yield server
    server.end()


def start(machines: TwoMachines, name: str, nats: NatsProcess, root: Path, *, stream: bool) -> FarWorker:
    directory = root / name
    directory.mkdir(mode=0o700)
    lease = f"{name}-{OF_STREAMS if stream else FRONTEND}"
    told = Told(nats.address, lease, str(directory), "" if stream else machines.network, stream)
    command = machines.command(name, sys.executable, "-m", "tests.e2e.kv.far_worker")
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(told).decode() + "\n")
    process.stdin.flush()
    return FarWorker(lease, process)


@asynccontextmanager
async def pair_of(
    machines: TwoMachines, nats: NatsProcess, root: Path, *, stream: bool = False
) -> AsyncIterator[Frontend]:
    source, reader = workers = [start(machines, name, nats, root, stream=stream) for name in machines.names]
    try:
        for worker in workers:
            _, worker.machine, worker.network = (await worker.until("ready")).split()
        bus = await Bus.connect(nats.address, name="test")
        found = Frontend(bus, source, reader, OF_STREAMS if stream else FRONTEND)
        await found.listen()
        await found.reader.order("patience", PATIENCE_S)
        yield found
        await bus.close()
    finally:
        for worker in workers:
            worker.end()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def far_pair(
    turn: str, machines: TwoMachines, nats: NatsProcess, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Frontend]:
    async with pair_of(machines, nats, tmp_path_factory.mktemp("workers")) as pair:
        yield pair


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def lending(far_pair: Frontend) -> AsyncIterator[None]:
    yield
    if far_pair.source.process.poll() is None:
        await far_pair.source.order("lend")
        await far_pair.reader.order("patience", PATIENCE_S)


async def test_two_namespaces_are_two_machines_in_one_network(far_pair: Frontend, machines: TwoMachines) -> None:
    workers = (far_pair.source, far_pair.reader)
    assert far_pair.source.machine != far_pair.reader.machine
    assert {worker.network for worker in workers} == {machines.network}
    for address, name in zip(machines.addresses, machines.names, strict=True):
        listening = machines.command(name, "ss", "-ltnH")
        asked = asyncio.to_thread(subprocess.run, listening, capture_output=True, text=True, check=True)
        shown = (await asked).stdout
        addresses = set(re.findall(r"(\S+):\d+ +\S+ *$", shown, re.MULTILINE))
        assert addresses == {address}


async def test_kv_is_read_and_continued_exactly(far_pair: Frontend) -> None:
    prompt = prompt_of(LENGTH, seed=1)
    expected = await far_pair.compute(prompt)
    pulled = await far_pair.answer(await far_pair.pull(prompt))
    assert (pulled.tokens, pulled.cached) == (expected, FULL * BLOCK)


async def test_a_prefill_is_continued_on_another_machine(far_pair: Frontend) -> None:
    prompt = prompt_of(LENGTH, seed=8)
    prefill = await far_pair.submit(far_pair.source, prompt, count=1, hold_s=PIN_S)
    first = (await far_pair.answer(prefill)).tokens
    # Nothing but the hold keeps its blocks.
    await far_pair.answer(await far_pair.submit(far_pair.source, prompt_of(BLOCK * (BLOCKS - FULL - 1), 9), count=1))
    rest = await far_pair.answer(await far_pair.pull(prompt + first))
    assert rest.cached == FULL * BLOCK
    await far_pair.bus.send(far_pair.subjects.work(far_pair.source.lease), Cancel((RequestEpoch(prefill[:-2], 1),)))
    expected = await far_pair.answer(await far_pair.submit(far_pair.source, prompt, count=COUNT + 1))
    assert first + rest.tokens == expected.tokens


async def test_a_running_request_migrates_to_another_machine(far_pair: Frontend) -> None:
    await far_pair.source.order("lend")
    prompt = prompt_of(5 * BLOCK + 1, seed=10)
    count = 5 * BLOCK
    name = await far_pair.assign(far_pair.source, "moves", 1, prompt, count)
    await far_pair.so_far(name, BLOCK)
    await far_pair.migrate(Reserve("moves", FRONTEND, len(prompt) + count, PIN_S))
    context = prompt + await far_pair.so_far(name, 0)
    warm = Warm("moves", far_pair.source.lease, context, within_s=PATIENCE_S)
    assert await far_pair.migrate(warm) >= (len(context) - 1) // BLOCK * BLOCK
    await far_pair.source.until("held")
    accepted = await far_pair.so_far(name, 0)
    left = count - len(accepted)
    how = {"position": len(accepted), "source": far_pair.source.lease}
    moved = await far_pair.assign(far_pair.reader, "moves", 2, prompt + accepted, left, **how)
    rest = await far_pair.answer(moved)
    assert accepted + rest.tokens == (await far_pair.answer(name)).tokens


async def read_too_late(pair: Frontend, seed: int, then: str) -> tuple[Answer, list[int]]:
    """Have the source reuse blocks before they are read, and be ordered something. Returns what came of the read, and
    the tokens that are right."""
    prompt = prompt_of(LENGTH, seed=seed)
    expected = await pair.compute(prompt)
    await pair.source.order("steal")
    name = await pair.pull(prompt)
    await pair.source.until("stolen")
    await pair.overwrite(seed=seed + 1)
    await pair.source.order(then)
    return await pair.answer(name), expected


async def test_blocks_that_were_reused_before_the_read_are_not_counted(far_pair: Frontend) -> None:
    pulled, expected = await read_too_late(far_pair, seed=2, then="lend")
    assert (pulled.tokens, pulled.cached) == (expected, 0)


async def test_without_the_source_s_word_these_would_be_wrong(far_pair: Frontend) -> None:
    """That the test before would see it: here the source says that it has held what it gave away."""
    pulled, expected = await read_too_late(far_pair, seed=4, then="lie")
    assert pulled.cached == FULL * BLOCK
    assert pulled.tokens != expected


async def test_a_confirmation_that_comes_late_does_not_count(far_pair: Frontend) -> None:
    prompt = prompt_of(LENGTH, seed=6)
    expected = await far_pair.compute(prompt)
    await far_pair.source.order("late")
    await far_pair.reader.order("patience", SHORT_S)
    name = await far_pair.pull(prompt)
    await far_pair.source.until("asked")
    pulled = await far_pair.answer(name)
    assert (pulled.tokens, pulled.cached) == (expected, 0)


async def test_a_source_that_is_killed_between_read_and_confirmation(far_pair: Frontend) -> None:
    """The last test of these workers: it leaves no source."""
    prompt = prompt_of(LENGTH, seed=7)
    expected = await far_pair.compute(prompt)
    await far_pair.source.order("late")
    name = await far_pair.pull(prompt)
    await far_pair.source.until("asked")
    far_pair.source.kill()
    far_pair.source.process.wait(PATIENCE_S)
    await far_pair.bus.publish(far_pair.subjects.lost, codec.encode(LeaseLost(far_pair.source.lease)))
    pulled = await far_pair.answer(name)
    assert (pulled.tokens, pulled.cached) == (expected, 0)


async def test_kv_comes_on_a_stream_where_no_network_is_closed(
    machines: TwoMachines, nats: NatsProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with pair_of(machines, nats, tmp_path_factory.mktemp("streams"), stream=True) as pair:
        assert {worker.network for worker in (pair.source, pair.reader)} == {TLS_STREAM}
        for seed in (20, 21):
            prompt = prompt_of(LENGTH, seed=seed)
            expected = await pair.compute(prompt)
            pulled = await pair.answer(await pair.pull(prompt))
            assert (pulled.tokens, pulled.cached) == (expected, FULL * BLOCK)
        pulled, expected = await read_too_late(pair, seed=22, then="lend")
        assert (pulled.tokens, pulled.cached) == (expected, 0)


async def test_a_read_from_a_machine_that_vanishes_ends(machines: TwoMachines) -> None:
    """Its blocks are kept until then. With TCP alone that would take a quarter of an hour."""
    with ExitStack() as stack:
        readers = [stack.enter_context(agents_on(machines, kind)) for kind in ("network", "stream")]
        for reader in readers:
            await reader.until("connected")
            reader.ask()
            await reader.until("DONE")
        machines.line.set(Conditions(cut=True))
        stack.callback(machines.line.set, Conditions())
        for reader in readers:
            reader.ask()
        endings = await asyncio.gather(*(reader.until("ended") for reader in readers))
        assert [ending.split()[1] for ending in endings] == ["nixlRemoteDisconnectError", "EngineError"]
