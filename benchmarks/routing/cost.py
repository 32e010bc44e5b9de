"""What a routing decision costs: CPU time of the production policy, index and ledger for one request."""

from __future__ import annotations

import random
import time
import tracemalloc

from benchmarks.harness.report import Figures, milliseconds, progress, table
from benchmarks.harness.spread import median, quantile
from dynamo_local.core.messages.kv import KvChanges
from dynamo_local.core.messages.routing import AssignRequest
from dynamo_local.core.routing.caches.index import PrefixIndex, pack
from dynamo_local.core.routing.ledger import Ledger
from dynamo_local.core.routing.policies import SoonestFirstToken
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.sim.fleet import names
from dynamo_local.sim.routers import presence_of

_BLOCK_TOKENS = 32
_PREFIXES = 200
"""Different prompts, each cached at a few workers."""


def decisions(quick: bool) -> Figures:
    """Time of a decision with its charge, by workers and blocks of the prompt."""
    sizes = [(8, 100), (64, 100), (1_000, 100), (64, 3_125)]
    found = {f"{workers} x {blocks}": _decided(workers, blocks, 200 if quick else 5_000) for workers, blocks in sizes}
    rows = [
        [name, *(milliseconds(value, 3) for value in (median(taken), quantile(taken, 0.99)))]
        for name, taken in found.items()
    ]
    table("CPU time of a decision", ("workers x blocks", "median, ms", "p99, ms"), rows)
    each = _bytes_of_a_block()
    table("Memory of the index", ("workers", "bytes a block"), [["8", f"{each:.0f}"]])
    hashed = _hashed(3 if quick else 25)
    table(
        "CPU time of hashing 100,000 tokens",
        ("median, ms", "worst, ms"),
        [[milliseconds(median(hashed)), milliseconds(max(hashed))]],
    )
    return {
        "hashed_s": hashed,
        "p99_s": {name: quantile(taken, 0.99) for name, taken in found.items()},
        "bytes_per_block": each,
    }


def _decided(workers: int, blocks: int, requests: int) -> list[float]:
    """Seconds of CPU for each request."""
    draw = random.Random(blocks)
    settings = MockerSettings(mocker_block_size=_BLOCK_TOKENS, mocker_kv_blocks=10**6)
    fleet = [presence_of(name, settings) for name in names(workers)]
    ledger, policy = Ledger(), SoonestFirstToken()
    prompts = [[draw.getrandbits(64) for _ in range(blocks)] for _ in range(_PREFIXES)]
    for number, prompt in enumerate(prompts):
        for worker in draw.sample(fleet, 3):
            had = prompt[: draw.randint(1, blocks)]
            ledger.index.replace(worker.lease, (), had)
        ledger.charge("f", f"before {number}", draw.choice(fleet).lease, 1_000)
    taken = []
    for number in range(requests):
        keys = pack(draw.choice(prompts))
        request = AssignRequest(f"r{number}", "f", blocks * _BLOCK_TOKENS + 1, blocks=keys, block_tokens=_BLOCK_TOKENS)
        begun = time.thread_time()
        choice = policy.choose(request, fleet, ledger, 0.0)
        assert choice is not None, "a fleet without workers"
        ledger.charge("f", request.request_id, choice.worker, request.tokens, blocks=keys)
        taken.append(time.thread_time() - begun)
        if number >= workers:
            ledger.release("f", f"r{number - workers}")
    progress(f"{workers} workers, {blocks} blocks")
    return taken


def _hashed(rounds: int) -> list[float]:
    """Seconds of CPU for the hashes that a frontend makes of a long prompt, by vLLM's default algorithm."""
    from vllm.config import CacheConfig  # takes seconds to import, for this alone

    from dynamo_local.engine.vllm.kv.identity import BlockHasher

    hasher, draw = BlockHasher(CacheConfig(block_size=_BLOCK_TOKENS)), random.Random(1)
    tokens = [draw.randrange(150_000) for _ in range(100_000)]
    taken = []
    for _ in range(rounds):
        begun = time.thread_time()
        hasher(tokens, None)
        taken.append(time.thread_time() - begun)
    return taken


def _bytes_of_a_block() -> float:
    workers, each = 8, 20_000
    draw = random.Random(1)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    index = PrefixIndex()
    for number in range(workers):
        index.apply(KvChanges(f"w{number}", 1, stored=pack([draw.getrandbits(64) for _ in range(each)])))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / (workers * each)
