"""Continuous batching as in vLLM: chunked prefill, prefix cache, preemption by recomputation, priorities.

Running requests are served first, in the order in which they were admitted; waiting ones are admitted with
what is left of the step's token budget. A running request that finds no block takes those of the one that
comes last in order, which waits again and is computed anew, from its prompt and what it has drawn.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from dynamo_local.core.errors import RequestError
from dynamo_local.core.messages import Load
from dynamo_local.engine.mocker import tokens
from dynamo_local.engine.mocker.blocks import BlockPool, root_hash
from dynamo_local.engine.mocker.sampling import Sampling
from dynamo_local.engine.mocker.sequence import Sequence
from dynamo_local.engine.mocker.settings import MockerSettings

_TOKEN_IDS = 2**63


@dataclass(frozen=True)
class Outcome:
    """What one step did."""

    computed: dict[Sequence, int]
    """Tokens whose KV was computed."""
    admitted: tuple[Sequence, ...]
    preempted: tuple[Sequence, ...]
    emitted: tuple[Sequence, ...]
    """Each has drawn one token, its last one, and may be finished by it."""

    @property
    def decode_seqs(self) -> int:
        return sum(count == 1 for count in self.computed.values())

    @property
    def prefill_tokens(self) -> int:
        return sum(self.computed.values()) - self.decode_seqs


class Scheduler:
    """Pure: no clock, no I/O.

    Invariants: waiting and finished requests refer to no block; a step computes something whenever there is
    work, because the request that comes first in order can take the blocks of all others, and fits alone.
    """

    def __init__(self, settings: MockerSettings) -> None:
        self._settings = settings
        self._pool = BlockPool(settings.mocker_kv_blocks)
        self._running: list[Sequence] = []
        """In order of admission."""
        self._waiting: list[Sequence] = []
        """Sorted by `order`."""
        self._submitted = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def load(self) -> Load:
        return Load(len(self._running), len(self._waiting), self._pool.usage)

    def submit(
        self,
        token_ids: Seq[int],
        sampling: Sampling,
        *,
        priority: int = 0,
        arrival_time: float = 0.0,
        cache_salt: str | None = None,
    ) -> Sequence:
        """Queue a request. Raises RequestError if it could never run."""
        limit = self._settings.context_limit
        _check_prompt(token_ids, limit)
        end = limit if sampling.max_tokens is None else min(limit, len(token_ids) + sampling.max_tokens)
        self._submitted += 1
        sequence = Sequence(
            tokens=list(token_ids),
            prompt_tokens=len(token_ids),
            sampling=sampling,
            order=(priority, arrival_time, self._submitted),
            end=end,
            root=root_hash(cache_salt),
            state=tokens.absorb(token_ids),
        )
        self._enqueue(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Forget a request and free its blocks. A finished or forgotten one is ignored."""
        if sequence in self._running:
            self._running.remove(sequence)
            self._free(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def step(self) -> Outcome:
        """Compute as much as budget and blocks allow."""
        planned, preempted = self._plan_running()
        # Not before the plan stands: who is preempted in a step has computed nothing in it.
        for sequence, count in planned.items():
            self._compute(sequence, count)
        admitted = {} if preempted else self._admit(self._budget - sum(planned.values()))
        computed = planned | admitted
        emitted = tuple([sequence for sequence in computed if sequence.computed == len(sequence.tokens)])
        for sequence in emitted:
            sequence.draw(self._settings.mocker_vocab_size)
        self._retire(emitted)
        return Outcome(computed, tuple(admitted), tuple(preempted), emitted)

    @property
    def _budget(self) -> int:
        return self._settings.mocker_max_num_batched_tokens

    def _plan_running(self) -> tuple[dict[Sequence, int], list[Sequence]]:
        """How much of each running request to compute, its blocks provided; and who made way for that."""
        planned: dict[Sequence, int] = {}
        preempted: list[Sequence] = []
        budget, index = self._budget, 0
        while index < len(self._running) and budget > 0:
            sequence = self._running[index]
            count = min(len(sequence.tokens) - sequence.computed, budget)
            if self._provide(sequence, count):
                planned[sequence] = count
                budget -= count
                index += 1
                continue
            at, victim = max(enumerate(self._running), key=lambda item: item[1].order)
            index -= at < index
            budget += planned.pop(victim, 0)
            self._preempt(victim)
            preempted.append(victim)
        return planned, preempted

    def _admit(self, budget: int) -> dict[Sequence, int]:
        """Let waiting requests in, in order, while budget, places and blocks for all of one are left."""
        block_size = self._settings.mocker_block_size
        admitted: dict[Sequence, int] = {}
        while self._waiting and budget > 0 and len(self._running) < self._settings.mocker_max_num_seqs:
            sequence = self._waiting[0]
            # The last token is always computed: the next one is drawn from that.
            full = (len(sequence.tokens) - 1) // block_size
            hits = self._pool.match(sequence.hashes(full, block_size))
            if self._blocks_of(len(sequence.tokens)) - len(hits) > self._pool.free_beside(hits):
                break
            self._running.append(self._waiting.pop(0))
            self._pool.acquire(hits)
            sequence.blocks = hits
            sequence.computed = len(hits) * block_size
            if sequence.cached_tokens is None:
                sequence.cached_tokens = sequence.computed
            count = min(len(sequence.tokens) - sequence.computed, budget)
            self._provide(sequence, count)
            self._compute(sequence, count)
            admitted[sequence] = count
            budget -= count
        return admitted

    def _provide(self, sequence: Sequence, count: int) -> bool:
        """Give a request the blocks for `count` more tokens, if that many are free."""
        lacking = self._blocks_of(sequence.computed + count) - len(sequence.blocks)
        if lacking > self._pool.free:
            return False
        if lacking > 0:
            sequence.blocks.extend(self._pool.allocate(lacking))
        return True

    def _compute(self, sequence: Sequence, count: int) -> None:
        block_size = self._settings.mocker_block_size
        before = sequence.computed // block_size
        sequence.computed += count
        after = sequence.computed // block_size
        if after > before:
            hashes = sequence.hashes(after, block_size)
            for index in range(before, after):
                self._pool.register(sequence.blocks[index], hashes[index])

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._free(sequence)
        self._enqueue(sequence)

    def _retire(self, emitted: tuple[Sequence, ...]) -> None:
        finished = [sequence for sequence in emitted if sequence.finish is not None]
        if finished:
            self._running = [sequence for sequence in self._running if sequence.finish is None]
        for sequence in finished:
            self._free(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        insort(self._waiting, sequence, key=lambda waiting: waiting.order)

    def _free(self, sequence: Sequence) -> None:
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0

    def _blocks_of(self, token_count: int) -> int:
        return -(-token_count // self._settings.mocker_block_size)


def _check_prompt(token_ids: Seq[int], limit: int) -> None:
    if not token_ids:
        raise RequestError("the prompt is empty")
    if len(token_ids) >= limit:
        raise RequestError(f"a prompt of {len(token_ids)} tokens leaves no room for output in a context of {limit}")
    if min(token_ids) < 0 or max(token_ids) >= _TOKEN_IDS:
        raise RequestError("the prompt has a token id out of range")
