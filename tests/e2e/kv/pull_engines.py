"""Real engines in the hands of a test, without workers and bus, and levers to make their processes slow."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from dynamo_local.core.errors import EngineError
from dynamo_local.core.messages.kv import PinQuestion
from dynamo_local.core.messages.presence import Load
from dynamo_local.core.messages.work import RequestEpoch, Submit, TokenDelta
from dynamo_local.core.ports import PulledPrefix
from dynamo_local.core.routing.caches.index import key_of
from dynamo_local.core.routing.caches.mirror import CacheMirror
from dynamo_local.engine.vllm.engine import VllmEngine
from dynamo_local.engine.vllm.kv.pull.messages import PullCounts
from dynamo_local.model.named.random_model import random_model
from state.machine.processes import descendants
from tests.integration.server_process import parent_of

BLOCK = 32
BLOCKS = 128
SLOTS = 16
LONG_S = 300.0
"""A lease that does not end while a test runs."""

PATIENCE_S = 240.0


class Levers:
    """Shared with engine processes that are forked later."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 3)

    def _set(self, index: int, on: bool) -> None:
        self._memory[index] = int(on)

    def _get(self, index: int) -> bool:
        return bool(self._memory[index])

    reads_wait = property(lambda self: self._get(0), lambda self, on: self._set(0, on))
    """Reads do not begin."""
    reads_do_not_end = property(lambda self: self._get(1), lambda self, on: self._set(1, on))
    """Reads end, but are not seen to."""
    steps_are_slow = property(lambda self: self._get(2), lambda self, on: self._set(2, on))
    """Steps begin to compute late."""

    def clear(self) -> None:
        self._memory[:] = bytes(len(self._memory))


Patch = Callable[[object, str, object], None]


def make_reads_obey(levers: Levers, patch: Patch) -> None:
    """Patch the workers of engines that start from now on."""
    from dynamo_local.engine.vllm.kv.pull.worker import PullWorker

    begin, poll = PullWorker._read_blocks_for_req, PullWorker._pop_done_transfers

    def begin_unless(self: PullWorker, req_id: str, meta: Any) -> None:
        if levers.reads_wait and req_id in self._recving_metadata:
            # As if its handshake were not over yet: it is looked at again in a later step.
            self._handshake_initiation_executor.submit(_put_later, self._ready_requests, (req_id, meta))
        else:
            begin(self, req_id, meta)

    def poll_unless(self: PullWorker, transfers: Any) -> Any:
        return (set(), set()) if levers.reads_do_not_end else poll(self, transfers)

    patch(PullWorker, "_read_blocks_for_req", begin_unless)
    patch(PullWorker, "_pop_done_transfers", poll_unless)


def make_steps_obey(levers: Levers, patch: Patch) -> None:
    """Patch the connectors of engines that start from now on."""
    from dynamo_local.engine.vllm.kv.pull.connector import PrefixPullConnector

    bind = PrefixPullConnector.bind_connector_metadata

    def bind_slowly(self: PrefixPullConnector, connector_metadata: Any) -> None:
        if levers.steps_are_slow:
            time.sleep(0.4)
        bind(self, connector_metadata)

    patch(PrefixPullConnector, "bind_connector_metadata", bind_slowly)


def _put_later(ready: Any, entry: Any) -> None:
    time.sleep(0.01)
    ready.put(entry)


@dataclass
class Answer:
    """Output of a request so far."""

    tokens: list[int] = field(default_factory=list)
    cached: int | None = None
    preempted: bool = False
    finish: str | None = None


class PullEngine:
    """Engine under test. Prompts are greedy continuations that do not stop by themselves."""

    def __init__(self, name: str, private_dir: Path, **config: Any) -> None:
        self.name = name
        private_dir.mkdir(mode=0o700)
        settings = {
            "model": str(random_model()),
            "dtype": "float32",
            "max-model-len": 4096,
            "block-size": BLOCK,
            # vLLM keeps one of them for itself.
            "num-gpu-blocks-override": BLOCKS + 1,
            "kv-cache-memory-bytes": 1 << 28,
            "max-num-batched-tokens": 256,
            "max-num-seqs": SLOTS,
            "enforce-eager": True,
        }
        self.engine = VllmEngine({**settings, **config}, private_dir, kv_transfer=True)
        self.load: Load | None = None
        self.mirror = CacheMirror(name)
        self.most_pinned = 0.0
        """Highest of all loads so far; a test may begin anew."""
        self.pids: list[int] = []
        self._answers: dict[str, Answer] = {}
        self._changed = asyncio.Condition()
        self._pump: asyncio.Task[None]
        self._pins = 0

    async def start(self) -> None:
        await self.engine.start(lambda _: None)
        manager = self.engine._core.resources.engine_manager
        roots = [process.pid for process in manager.processes]
        self.pids = [pid for pid in descendants(os.getpid()) if pid in roots or parent_of(pid) in roots]
        watched = self.engine._processes
        assert watched is not None
        assert len(watched.pids) == 2, "an engine core and its worker"
        assert set(watched.pids) <= set(self.pids)
        self._pump = asyncio.create_task(self._take_steps())

    async def close(self) -> None:
        self._pump.cancel()
        core = self.engine._core
        await self.engine.close(5.0)
        if core is None:
            return
        # Those of an engine that has died are closed when vLLM's thread that noticed it has this loop do so. A context
        # of ZeroMQ that is collected before, while a failure is printed, would wait for them for ever.
        sockets = (core.resources.input_socket, core.resources.output_socket)
        async with asyncio.timeout(PATIENCE_S):
            while not all(socket.closed for socket in sockets):  # noqa: ASYNC110  # nothing tells of it
                await asyncio.sleep(0.01)

    def kill(self) -> None:
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def submit(
        self,
        tokens: Sequence[int],
        count: int,
        pulled: PulledPrefix | None = None,
        *,
        hold_s: float = 0.0,
        priority: int = 0,
    ) -> str:
        work = msgspec.structs.replace(self._work(tokens, count, hold_s), priority=priority)
        await self.engine.submit(work, pulled)
        return work.request_id

    async def warm(self, tokens: Sequence[int]) -> str:
        """Have it run."""
        work = self._work(tokens, 1, LONG_S)
        await self.engine.warm(work)
        await self.answer(work.request_id)
        return work.request_id

    async def grow(self, tokens: Sequence[int], count: int, from_warm: str, *, warm: bool = False) -> str | None:
        """The name of a request that has grown from that one, or None."""
        work = self._work(tokens, count)
        grown = await self.engine.grow(work, RequestEpoch(from_warm, 1), warm=warm)
        return work.request_id if grown else None

    def _work(self, tokens: Sequence[int], count: int, hold_s: float = 0.0) -> Submit:
        name = f"{self.name}{len(self._answers)}"
        self._answers[name] = Answer()
        sampling = msgspec.msgpack.encode({"max_tokens": count, "temperature": 0.0, "ignore_eos": True})
        return Submit(
            request_id=name,
            epoch=1,
            frontend="f",
            token_ids=list(tokens),
            sampling=msgspec.Raw(sampling),
            hold_s=hold_s,
        )

    async def answer(self, name: str, at_least: int | None = None) -> Answer:
        """Once it is complete, or so long."""
        answer = self._answers[name]

        def far_enough() -> bool:
            return answer.finish is not None or (at_least is not None and len(answer.tokens) >= at_least)

        await self.until(far_enough)
        return replace(answer, tokens=list(answer.tokens))

    def has_begun(self, name: str) -> bool:
        """Whether it has brought a token."""
        return bool(self._answers[name].tokens)

    def is_over(self, name: str) -> bool:
        return self._answers[name].finish is not None

    async def run(self, tokens: Sequence[int], count: int, pulled: PulledPrefix | None = None) -> Answer:
        return await self.answer(await self.submit(tokens, count, pulled))

    async def park(self) -> None:
        """Park once the last step has ended."""
        await self.counts_until(lambda counts: counts.scheduled_steps == counts.ended_steps)
        await self.engine.park(PATIENCE_S)

    async def cached(self, tokens: Sequence[int]) -> int:
        """Number of a context's blocks that are cached here."""
        prefix = self.engine.prefix(tokens, None, None)
        assert prefix is not None
        return await self.engine.cached(prefix)

    async def agrees(self, tokens: Sequence[int]) -> int:
        """Number of a context's cached blocks, once the steps have told of just as many. No request runs."""
        prefix = self.engine.prefix(tokens, None, None)
        assert prefix is not None
        cached = await self.engine.cached(prefix)
        keys = [key_of(block_hash) for block_hash in prefix.hashes]

        def told() -> int:
            return next((index for index, key in enumerate(keys) if key not in self.mirror), len(keys))

        await self.until(lambda: told() == cached)
        return cached

    def resident(self) -> int:
        """Bytes of memory that the engine's processes have."""
        return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.pids) * mmap.PAGESIZE

    async def cancel(self, name: str) -> None:
        await self.engine.cancel([RequestEpoch(name, 1)])

    async def until(self, condition: Callable[[], bool]) -> None:
        """A condition on what comes out of the steps."""
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(condition)

    async def counts(self) -> PullCounts:
        assert self.engine._pull is not None
        return await self.engine._pull.counts()

    async def counts_until(self, condition: Callable[[PullCounts], bool]) -> PullCounts:
        async with asyncio.timeout(PATIENCE_S):
            # Each question is answered between two steps: that is a pause.
            while True:
                counts = await self.counts()
                if condition(counts):
                    return counts

    async def settled(self) -> None:
        """No block is used for anything."""
        await self.counts_until(lambda counts: (counts.used_blocks, counts.leases, counts.reads) == (0, 0, 0))

    async def ask(self, source: PullEngine, tokens: Sequence[int], lasts_s: float = LONG_S) -> PulledPrefix:
        """Pin what this engine lacks of a context at the source."""
        prefix = self.engine.prefix(tokens, None, None)
        assert prefix is not None
        cached = await self.engine.cached(prefix)
        hashes = prefix.hashes[cached:]
        self._pins += 1
        # A source finds what is behind blocks only if it is told of all of them.
        rest = () if cached else prefix.rest
        question = PinQuestion(f"{self.name}-{self._pins}", prefix.fingerprint, hashes, lasts_s, rest)
        return PulledPrefix(question.pin, hashes, await source.engine.pin(question), rest=len(rest))

    async def _take_steps(self) -> None:
        with suppress(EngineError):
            while True:
                step = await self.engine.step()
                async with self._changed:
                    self.load = step.load or self.load
                    if step.cache is not None:
                        self.mirror.apply(step.cache)
                    self.most_pinned = max(self.most_pinned, (self.load and self.load.kv_pinned) or 0.0)
                    for delta in step.deltas:
                        self._note(delta)
                    self._changed.notify_all()

    def _note(self, delta: TokenDelta) -> None:
        answer = self._answers[delta.request_id]
        answer.tokens += delta.token_ids
        answer.cached = delta.cached_tokens if answer.cached is None else answer.cached
        answer.preempted |= any(kind == PREEMPTED for kind, _ in delta.events)
        answer.finish = delta.finish


PREEMPTED = 3
"""vLLM's EngineCoreEventType of that name."""


def prompt_of(length: int, seed: int) -> list[int]:
    """Text that nobody has cached."""
    drawn = random.Random(seed)
    return [drawn.randrange(256) for _ in range(length)]
