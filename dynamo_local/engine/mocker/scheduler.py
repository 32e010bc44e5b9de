"""Continuous batching as in vLLM: chunked prefill, prefix cache, preemption by recomputation, priorities.

Running requests are served first, in the order in which they were admitted; waiting ones are admitted with
what is left of the step's token budget, in the order of core/priority/fair_queue.py. A running request that finds no
block takes those of the one that is the least urgent, then the latest, which waits again and is computed anew, from its
prompt and what it has drawn. Where no place is left, one gives way to a request of a higher class in the same manner.

A request with blocks to pull is given all blocks of its prompt when its turn comes, and gives way to others while
those are read. Then it is the first to be admitted, with what was read as cached.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Seq

from dynamo_local.core.messages.presence import Load
from dynamo_local.core.priority.classes import class_of
from dynamo_local.core.priority.fair_queue import Claim, FairQueue
from dynamo_local.engine.kv.leases import Key, Leases
from dynamo_local.engine.mocker import tokens
from dynamo_local.engine.mocker.blocks import (
    BlockHash,
    BlockMemory,
    BlockPool,
    Filling,
    fill,
    foreign_content,
    root_hash,
)
from dynamo_local.engine.mocker.sequence import Read, Sequence, StepOutcome, check_prompt
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.engine.mocker.tokens import Sampling


class Scheduler:
    """Pure: no clock, no I/O. A step is two calls, `begin` and `complete`; time passes in between.

    Invariants: waiting and finished requests refer to no block; a step computes something whenever there is
    work and no block is in a lease or being read into, because the request that comes first in order can take the
    blocks of all others, and fits alone.
    """

    def __init__(self, settings: MockerSettings, *, contents: bool = True) -> None:
        """`contents`: whether to keep what the blocks hold, and have the tokens depend on that."""
        self._settings = settings
        self._contents = contents
        self.memory = BlockMemory(settings.mocker_kv_blocks)
        self.pool = BlockPool(settings.mocker_kv_blocks, keep_freed=settings.mocker_prefix_caching)
        self.leases = Leases(self.pool, settings.most_leased)
        self.pool.report_references(self.leases.note)
        self._running: list[Sequence] = []
        """Requests in order of admission."""
        self._waiting = FairQueue[Sequence](lambda sequence: sequence.length, lambda sequence: sequence.is_over)
        self._loading: list[Sequence] = []
        """Requests whose blocks are being read."""
        self._loaded: list[Sequence] = []
        """Requests that have all blocks of their prompts, and wait for a place, in order of their claims."""
        self._submitted = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._loaded)

    @property
    def load(self) -> Load:
        waiting = len(self._waiting) + len(self._loading) + len(self._loaded)
        total, kept = self.pool.total, self.leases.kept()
        return Load(len(self._running), waiting, (total - self.pool.free - kept) / total, kept / total)

    @property
    def running(self) -> Seq[Sequence]:
        """Requests that run, in order of admission."""
        return self._running

    def submit(
        self,
        token_ids: Seq[int],
        sampling: Sampling,
        *,
        priority: int = 0,
        arrival_time: float = 0.0,
        key: str = "",
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Sequence:
        """Queue a request. Raises BadRequestError if it could never run."""
        limit = self._settings.context_limit
        check_prompt(token_ids, limit)
        end = limit if sampling.max_tokens is None else min(limit, len(token_ids) + sampling.max_tokens)
        self._submitted += 1
        sequence = Sequence(
            tokens=list(token_ids),
            prompt_tokens=len(token_ids),
            sampling=sampling,
            claim=Claim(priority, arrival_time, self._submitted, key),
            end=end,
            root=root_hash(cache_salt, adapter),
            state=tokens.absorb(token_ids, tokens.start_of(adapter)),
        )
        self.enter(sequence)
        return sequence

    def enter(self, sequence: Sequence) -> None:
        """Queue a request that fits into the cache alone."""
        self._waiting.add(sequence, sequence.claim)

    def cancel(self, sequence: Sequence) -> None:
        """Forget a request and free its blocks. A finished or forgotten one is ignored."""
        places = self._running, self._waiting, self._loading, self._loaded
        place = next((place for place in places if sequence in place), None)
        if place is not None:
            place.remove(sequence)
            sequence.finish = "abort"
            self._free(sequence)

    def empty_cache(self) -> str | None:
        """Forget what is cached. Returns why this is refused, or None."""
        if self.has_work or self._loading:
            return "the engine has requests"
        if len(self.leases):
            return "blocks of its KV cache are kept for readers"
        # A cancelled request's step may still write to its blocks.
        if not self.pool.empty():
            return "blocks of its KV cache are in use"
        self.memory.clear()
        return None

    def begin(self, now: float = 0.0) -> StepOutcome:
        """Plan a step: as much as budget and blocks allow. It may turn out empty."""
        draft = StepOutcome(self._settings.mocker_max_num_batched_tokens)
        given_way = self._make_room()
        # Not before the plan stands: a request that is preempted in a step computes nothing in it.
        for sequence, count in self._plan_running(draft).items():
            self._compute(sequence, count, draft)
        if not draft.preempted:
            if not self._waiting.is_called:
                self._admit_loaded(draft)
            self._admit_waiting(draft, now)
        if given_way is not None:
            # Not before: it is not let in again in the step in which it gave way.
            self.enter(given_way)
            draft.preempted.append(given_way)
        draft.emitted = [sequence for sequence in draft.computed if sequence.computed == sequence.length]
        return draft

    def complete(self, outcome: StepOutcome, now: float = 0.0) -> None:
        """The step's time is over: its blocks are written, its tokens drawn from what the blocks hold."""
        if self._contents:
            for filling in outcome.fillings:
                fill(self.memory, filling)
        running = set(self._running)
        # Not those cancelled meanwhile.
        emitted = [sequence for sequence in outcome.emitted if sequence in running]
        for sequence in emitted:
            sequence.draw(self._settings.mocker_vocab_size, self._foreign(sequence) if self._contents else None)
        self._retire([sequence for sequence in emitted if sequence.finish is not None], now)

    def is_loading(self, sequence: Sequence) -> bool:
        """Whether a read for it is still wanted."""
        return sequence in self._loading

    def end_read(self, read: Read, received: bool) -> None:
        """The read is over. What was received counts as cached from now on; the rest will be computed."""
        sequence = read.sequence
        self._loading.remove(sequence)
        if not received:
            self._free(sequence)
            self.enter(sequence)
            return
        sequence.computed = read.pull.end * self._settings.mocker_block_size
        self._register(sequence, read.start)
        insort(self._loaded, sequence, key=lambda one: one.claim)

    def _make_room(self) -> Sequence | None:
        """Where a place is wanting, have a running request give way to one of a higher class. Return it, or None."""
        if self._has_place:
            return None
        # Of one class, those that are loaded are let in first.
        loaded = class_of(self._loaded[0].claim.priority) if self._loaded else None
        victim = self._waiting.make_room(self._running, above=loaded)
        if victim is None and loaded is not None:
            victim = self._waiting.gives_way(self._running, loaded)
        if victim is not None:
            self._running.remove(victim)
            self._free(victim)
        return victim

    def _plan_running(self, draft: StepOutcome) -> dict[Sequence, int]:
        """Decide how much of each running request to compute, and provide the blocks, preempting others if need be."""
        planned: dict[Sequence, int] = {}
        budget, index = draft.budget, 0
        while index < len(self._running) and budget > 0:
            sequence = self._running[index]
            count = min(sequence.length - sequence.computed, budget)
            if self._provide(sequence, count):
                planned[sequence] = count
                budget -= count
                index += 1
                continue
            at, victim = max(enumerate(self._running), key=lambda item: item[1].claim)
            index -= at < index
            budget += planned.pop(victim, 0)
            self._preempt(victim)
            draft.preempted.append(victim)
        return planned

    def _admit_loaded(self, draft: StepOutcome) -> None:
        """First those that hold blocks already: others may wait for these. Not while room has been made for one that is
        more urgent."""
        while self._loaded and draft.budget > 0 and self._has_place:
            self._start(self._loaded.pop(0), draft)

    def _admit_waiting(self, draft: StepOutcome, now: float) -> None:
        """Let waiting requests in, in order, while budget, places and blocks for all of one are left."""
        block_size, declined = self._settings.mocker_block_size, set[Sequence]()
        while self._waiting and draft.budget > 0 and self._has_place:
            sequence = self._waiting.peek()
            if sequence in declined:
                break
            # The last token is always computed: the next one is drawn from that.
            full = (sequence.length - 1) // block_size
            hits = self.pool.match(sequence.hashes(full, block_size))
            if self._blocks_of(sequence.length) - len(hits) <= self.pool.free_beside(hits):
                self._waiting.pop()
                self._admit(sequence, hits, draft, now)
            else:
                declined.add(sequence)

    def _admit(self, sequence: Sequence, hits: list[int], draft: StepOutcome, now: float) -> None:
        """Let a request in that has these blocks. It runs, or its blocks are read first."""
        self.pool.refer(hits)
        sequence.blocks, cached = hits, len(hits)
        sequence.computed = cached * self._settings.mocker_block_size
        pull, sequence.pull = sequence.pull, None
        if pull is not None and pull.helps(cached, now):
            # All blocks at once: once loaded it needs none that somebody else may hold.
            self._provide(sequence, sequence.length - sequence.computed)
            self._loading.append(sequence)
            draft.reads.append(Read(sequence, pull, cached))
        else:
            self._start(sequence, draft)

    @property
    def _has_place(self) -> bool:
        return len(self._running) < self._settings.mocker_max_num_seqs

    def _start(self, sequence: Sequence, draft: StepOutcome) -> None:
        """Run a request that has its blocks, or can have them."""
        self._running.append(sequence)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
        count = min(sequence.length - sequence.computed, draft.budget)
        self._provide(sequence, count)
        self._compute(sequence, count, draft)
        draft.admitted.append(sequence)

    def _provide(self, sequence: Sequence, count: int) -> bool:
        """Give a request the blocks for `count` more tokens, if that many are free."""
        lacking = self._blocks_of(sequence.computed + count) - len(sequence.blocks)
        if lacking > self.pool.free:
            return False
        if lacking > 0:
            sequence.blocks.extend(self.pool.allocate(lacking))
        return True

    def _compute(self, sequence: Sequence, count: int, draft: StepOutcome) -> None:
        """Compute `count` tokens more. As in vLLM, their blocks are found in the cache from now on, before they are
        written: a request that shares them computes later, in the same step or another one."""
        before = sequence.computed // self._settings.mocker_block_size
        sequence.computed += count
        draft.computed[sequence] = count
        draft.budget -= count
        if sequence.computed // self._settings.mocker_block_size == before:
            return
        hashes = self._register(sequence, before)
        if self._contents:
            draft.fillings.append(Filling(tuple(sequence.blocks[: len(hashes)]), tuple(hashes), before))

    def _foreign(self, sequence: Sequence) -> bytes | None:
        hashes = self._full_hashes(sequence)
        return foreign_content(self.memory, sequence.blocks[: len(hashes)], hashes)

    def _full_hashes(self, sequence: Sequence) -> list[BlockHash]:
        """Hashes of the blocks that are full of computed tokens."""
        block_size = self._settings.mocker_block_size
        return sequence.hashes(sequence.computed // block_size, block_size)

    def _register(self, sequence: Sequence, start: int) -> list[BlockHash]:
        """Enter full blocks from index `start` on in the cache. Returns the hashes of all."""
        hashes = self._full_hashes(sequence)
        for index in range(start, len(hashes)):
            self.pool.register(sequence.blocks[index], hashes[index])
        return hashes

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._free(sequence)
        self.enter(sequence)

    def _retire(self, finished: list[Sequence], now: float) -> None:
        if finished:
            self._running = [sequence for sequence in self._running if sequence.finish is None]
        for sequence in finished:
            if sequence.hold is not None:
                # Again, because a block elsewhere that had the same content may be gone by now.
                blocks = self.pool.match(self._register(sequence, 0))
                self.leases.take(Key("hold", str(sequence.hold.name)), blocks, now + sequence.hold.seconds)
            self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        self.pool.give_up(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0

    def _blocks_of(self, token_count: int) -> int:
        return -(-token_count // self._settings.mocker_block_size)
