"""What workers with real vLLM publish of their caches is what they have cached, to the token."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence

import openai
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.core.messages.admin import ParkAnswer, ParkQuestion
from dynamo_local.core.messages.kv import CachedAnswer, CachedQuestion, KvChanges, KvStateQuestion
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.routing import Assignment, AssignRequest, Released
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.routing.caches.index import key_of, pack_hashes
from dynamo_local.core.subjects import Subjects
from tests.e2e.kv.pull_engines import prompt_of
from tests.e2e.llm_server import PATIENCE_S, LlmServer, settled
from tests.kv_reader import KvReader

BLOCK = 32
"""As examples/llm/configs/agg_router.yaml has it."""


class Readers:
    """A reader for each worker."""

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self._bus = bus
        self._subjects = subjects
        self._readers: defaultdict[str, KvReader] = defaultdict(KvReader)
        self._changed = asyncio.Event()

    async def start(self, workers: Sequence[str]) -> None:
        await self._bus.listen(self._subjects.kv_events_of_all, KvChanges, self._read)
        await self._bus.flush()
        for lease in workers:
            await self._bus.send(self._subjects.kv_state(lease), KvStateQuestion())
            await self.until(lambda lease=lease: self._readers[lease].number is not None)  # type: ignore[misc]

    async def _read(self, message: KvChanges) -> None:
        self._readers[message.worker].read(message)
        self._changed.set()

    def cached(self, lease: str, keys: Sequence[int]) -> int:
        """Leading tokens that a worker has cached."""
        known = self._readers[lease].keys
        return BLOCK * next((index for index, key in enumerate(keys) if key not in known), len(keys))

    def blocks(self, lease: str) -> int:
        return len(self._readers[lease].keys)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


async def test_what_workers_publish_is_what_they_have_cached(pair: LlmServer, api: openai.OpenAI) -> None:
    from vllm.config import CacheConfig

    from dynamo_local.engine.vllm.kv.identity import BlockHasher

    found: list[Presence] = []

    def note(workers: list[Presence]) -> bool:
        found[:] = workers
        return settled(workers)

    await pair.until(note, "the workers are not idle")
    leases = [worker.lease for worker in found]
    assert all(worker.engine is not None and worker.engine.kv_events for worker in found)
    hasher = BlockHasher(CacheConfig(block_size=BLOCK))
    bus = await Bus.connect(BusAddress.load(pair.paths.bus_file), name="test")
    subjects = Subjects(pair.paths.namespace, FIRST_OF_MAIN)
    readers = Readers(bus, subjects)
    await readers.start(leases)
    begun = prompt_of(300, seed=301)
    prompts = [begun, [*begun, *prompt_of(200, seed=302)], prompt_of(64, seed=303), prompt_of(65, seed=304)]
    salts = [None, None, "salt", None]
    try:
        for prompt, salt in zip(prompts, salts, strict=True):
            body = {} if salt is None else {"cache_salt": salt}
            await asyncio.to_thread(
                api.completions.create, model="random", prompt=prompt, max_tokens=2, extra_body=body
            )
        await pair.until(note, "the workers are not idle")
        total = 0
        for lease in leases:
            for prompt, salt in zip(prompts, salts, strict=True):
                asked = CachedQuestion(prompt, salt)
                had = await bus.ask(subjects.cached(lease), asked, CachedAnswer, timeout_s=PATIENCE_S)
                # The last token is always computed.
                keys = [key_of(each) for each in hasher(prompt[:-1], salt)]
                await readers.until(lambda a=had, k=keys, w=lease: readers.cached(w, k) == a.tokens)  # type: ignore[misc]
                total += had.tokens
        assert total >= 288 + 480 + 32 + 64, "each prompt is cached somewhere"
        for number, (prompt, salt) in enumerate(zip(prompts, salts, strict=True)):
            blocks = pack_hashes(hasher(prompt, salt))
            question = AssignRequest(f"t{number}", "test", len(prompt), blocks=blocks, block_tokens=BLOCK)
            assigned = await bus.ask(subjects.assign, question, Assignment, timeout_s=PATIENCE_S)
            await bus.send(subjects.account, Released(question.request_id, question.frontend))
            body = {} if salt is None else {"cache_salt": salt}
            answer = await asyncio.to_thread(
                api.completions.create, model="random", prompt=prompt, max_tokens=2, extra_body=body
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            assert (
                answer.usage.prompt_tokens_details.cached_tokens
                == assigned.cached
                == (len(prompt) - 1) // BLOCK * BLOCK
            )
        await park(bus, subjects.parking(leases[0]), True)
        await readers.until(lambda: readers.blocks(leases[0]) == 0)
        await park(bus, subjects.parking(leases[0]), False)
    finally:
        await bus.close()


async def park(bus: Bus, subject: str, parked: bool) -> None:
    """Park a worker or wake it. It refuses as long as it brings prefixes, as one does that has just woken."""
    async with asyncio.timeout(PATIENCE_S):
        while (  # noqa: ASYNC110  # nothing tells
            await bus.ask(subject, ParkQuestion(parked), ParkAnswer, timeout_s=PATIENCE_S)
        ).parked is not parked:
            await asyncio.sleep(0.1)


async def test_a_worker_that_wakes_pulls_what_the_other_one_was_asked_for(pair: LlmServer, api: openai.OpenAI) -> None:
    from vllm.config import CacheConfig

    from dynamo_local.engine.vllm.kv.identity import BlockHasher

    found: list[Presence] = []

    def note(workers: list[Presence]) -> bool:
        found[:] = workers
        return settled(workers)

    await pair.until(note, "the workers are not idle")
    leases = [worker.lease for worker in found]
    prompt = prompt_of(300, seed=311)
    keys = [key_of(each) for each in BlockHasher(CacheConfig(block_size=BLOCK))(prompt[:-1], None)]
    bus = await Bus.connect(BusAddress.load(pair.paths.bus_file), name="test")
    subjects = Subjects(pair.paths.namespace, FIRST_OF_MAIN)
    readers = Readers(bus, subjects)
    try:
        await readers.start(leases)
        for _ in range(3):
            await asyncio.to_thread(api.completions.create, model="random", prompt=prompt, max_tokens=2)
        await readers.until(lambda: any(readers.cached(lease, keys) == len(keys) * BLOCK for lease in leases))
        # If that one was woken by the test before, it has perhaps pulled the prompt already. Parked, it has nothing.
        other = min(leases, key=lambda lease: readers.cached(lease, keys))
        await pair.until(note, "the workers are not idle")
        await park(bus, subjects.parking(other), True)
        await readers.until(lambda: readers.blocks(other) == 0)
        await park(bus, subjects.parking(other), False)
        await readers.until(lambda: readers.cached(other, keys) == len(keys) * BLOCK)
        had = await bus.ask(subjects.cached(other), CachedQuestion(prompt), CachedAnswer, timeout_s=PATIENCE_S)
        assert had.tokens == len(keys) * BLOCK
    finally:
        await bus.close()
