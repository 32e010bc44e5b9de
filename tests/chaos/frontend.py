"""A frontend without HTTP: the product's dispatcher, with clients that know their right answers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from components.frontend.dispatcher import BusDispatcher
from components.frontend.placing import LocalAssigner, RouterAssigner
from components.frontend.prefill import PrefillJobs
from components.frontend.requests.live_requests import LiveRequest
from components.frontend.requests.request_table import RequestTable
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import Announcer, FleetWatch
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.work import TokenDelta
from dynamo_local.core.request.disaggregation import PrefillLimits
from dynamo_local.core.request.recovery import COMPANY_DEATHS
from dynamo_local.core.subjects import Subjects
from dynamo_local.tasks import TaskGuard
from tests.chaos.answers import Answer, Outcome
from tests.chaos.faults import DEADLY, OF_WORKERS, Done
from tests.chaos.gaps import GapWatch, waits_of
from tests.chaos.results import Results
from tests.chaos.settings import BLOCK_SIZE, ChaosSettings
from tests.chaos.tasks import Task, draw_task

_log = logging.getLogger(__name__)


QUEUE_SIZE = 8
"""Maximum length of the prefill queue, in jobs."""

PULLED, COMPUTED = "handed over, KV found or pulled", "handed over, KV computed"


class LoggedTable(RequestTable):
    """The product's table, which here also logs which workers requests lose, and when."""

    on_lost: Callable[[LiveRequest], None]

    async def lose(self, live: LiveRequest, epoch: int) -> None:
        worker, recovery = live.log.worker, live.recovery
        _log.info(
            "%s#%d loses %s at %d (began at %d, %d fruitless; %s)",
            *(live.request_id, epoch, worker, live.log.position, recovery.epoch_start, recovery.fruitless),
            "known" if worker and self._fleet.view.get(worker) else "unknown",
        )
        self.on_lost(live)
        await super().lose(live, epoch)


class LoggedDispatcher(BusDispatcher):
    """The product's dispatcher, which here also logs losses and counts hand-overs."""

    table_type = LoggedTable
    hand_overs: Counter[str]

    def _accept(self, live: LiveRequest, delta: TokenDelta, now: float) -> TokenDelta | None:
        if live.prefill.held is not None and delta.cached_tokens is not None:
            # The last block is computed at any rate, unless it was full.
            pulled = delta.cached_tokens + BLOCK_SIZE >= len(live.request.prompt_token_ids)
            self.hand_overs[PULLED if pulled else COMPUTED] += 1
        return super()._accept(live, delta, now)


@dataclass
class _Waiting:
    """A client that waits for its answer."""

    answer: Answer
    news: asyncio.Event = field(default_factory=asyncio.Event)


class ChaosFrontend:
    """Assembles a frontend as components/frontend/service.py does, and announces it on the bus."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        watcher: str,
        stall_s: float,
        max_local_prefill_length: int | None = None,
        gap_slack_s: float = ChaosSettings.gap_slack_s,
    ) -> None:
        """`max_local_prefill_length`: prompts above this length go to prefill workers; None: the graph has none.
        `gap_slack_s`: time by which gaps of streams may exceed what the recorded faults explain."""
        self.lease = secrets.token_hex(8)
        self.tasks = TaskGuard()
        self.fleet = FleetWatch(bus, subjects)
        self.local = LocalAssigner(self.fleet, self.lease)
        router = RouterAssigner(bus, subjects, self.lease, self.local)
        self._jobs = None
        if max_local_prefill_length is not None:
            limits = PrefillLimits(max_local_prefill_length, QUEUE_SIZE)
            self._jobs = PrefillJobs(bus, subjects, self.lease, self.fleet, lambda: limits)
        self.dispatcher = LoggedDispatcher(bus, subjects, self.lease, self.fleet, router, self.tasks, jobs=self._jobs)
        self.dispatcher.hand_overs = Counter()
        assert isinstance(self.dispatcher.table, LoggedTable)
        self.dispatcher.table.on_lost = self._lost
        self._results = Results()
        presence = Presence(watcher, "Frontend", "frontend", self.lease, os.getpid(), "ready")
        self._announcer = Announcer(bus, subjects, presence)
        self._stall_s = stall_s
        self._gaps = GapWatch(gap_slack_s)
        self._waiting: dict[str, _Waiting] = {}
        self._numbers = itertools.count(1)
        self._over = asyncio.Event()
        self._streams: list[asyncio.Task[None]] = []

    @property
    def results(self) -> Results:
        """The results of the requests so far."""
        decisions = self._jobs.outcomes if self._jobs is not None else Counter[str]()
        migrations = {
            " by ".join(ended): count for ended, count in self.dispatcher.migrations.statistics.outcomes.items()
        }
        return msgspec.structs.replace(
            self._results,
            prefills=dict(decisions + self.dispatcher.hand_overs),
            migrations=migrations,
            gaps=self._gaps.gaps,
        )

    async def start(self) -> None:
        """Announce the frontend, and follow the fleet."""
        await self.dispatcher.start()
        await self.fleet.start()
        self.tasks.spawn("fleet", self.fleet.run())
        self.tasks.spawn("presence", self._announcer.run())
        self.tasks.spawn("outputs", self._take_outputs())

    def open_streams(self, count: int, seed: str) -> None:
        """Start `count` clients that each send one request after the other."""
        for number in range(count):
            rng = random.Random(f"{seed} stream {number}")
            self._streams.append(asyncio.create_task(self._ask_on_and_on(rng), name=f"stream {number}"))

    async def close_streams(self, deadline_s: float) -> int:
        """Send no more requests, and wait for the answers. Returns the number of unanswered requests."""
        self._over.set()
        if not self._streams:
            return 0
        done, pending = await asyncio.wait(self._streams, timeout=deadline_s)
        for stream in done:
            stream.result()
        return len(pending)

    def left_over(self) -> list[str]:
        """Return, in words, state that is left although every request has ended."""
        found = []
        if self.dispatcher.live_requests:
            found.append(f"{self.dispatcher.live_requests} requests live in the dispatcher: {self._live()}")
        if charged := self.local.ledger.of_frontend(self.lease):
            found.append(f"{len(charged)} requests are charged in the frontend's ledger")
        return found

    def migrations_at(self, watcher: str) -> Counter[str]:
        """Count the migrations in flight at a worker, by the worker's part in them and whether they have been cut."""
        leases = {member.lease for member in self.fleet.view.members() if member.watcher == watcher}
        found: Counter[str] = Counter()
        for live in self.dispatcher.table.requests.values():
            if (migration := live.migration.current) is None:
                continue
            when = "before the cut" if migration.cut_at is None else "after the cut"
            if migration.destination in leases:
                found[f"destination, {when}"] += 1
            elif live.log.worker in leases:
                found[f"source, {when}"] += 1
        return found

    def record_fault(self, fault: Done) -> None:
        """Record a fault that was done just now. It allows longer gaps of the streams that it meets."""
        leases = {member.lease for member in self.fleet.view.members() if member.watcher == fault.target}
        self._gaps.record_fault(
            fault.what, time.monotonic(), fault.seconds, leases if fault.what in OF_WORKERS else None
        )

    async def _ask_on_and_on(self, rng: random.Random) -> None:
        while not self._over.is_set():
            # Ids are unique to the frontend, as those of the OpenAI server are.
            await self._ask(draw_task(rng, f"{self.lease[:6]}-{next(self._numbers)}"))

    async def _ask(self, task: Task) -> None:
        answer = Answer(task, time.monotonic())
        waiting = self._waiting[task.request_id] = _Waiting(answer)
        await self.dispatcher.submit(task.request())
        while answer.outcome is None:
            waiting.news.clear()
            await self._wait(waiting)
        circumstances = self._circumstances(task.request_id)
        if answer.outcome in (Outcome.LEFT, Outcome.FORGOTTEN, Outcome.WRONG):
            await self.dispatcher.cancel([task.request_id])
        # Tokens accepted before the client left may still be queued. They are ignored from here on.
        del self._waiting[task.request_id]
        self._gaps.over(task.request_id)
        what = f"{answer}; {circumstances}"
        self._results.add(answer.outcome, answer.received, answer.longest_silence_s, answer.reason, what)

    async def _wait(self, waiting: _Waiting) -> None:
        answer, now = waiting.answer, time.monotonic()
        stalls_at = answer.news_at + self._stall_s
        leaves_after_s = answer.task.leaves_after_s
        leaves_at = stalls_at if leaves_after_s is None else answer.asked_at + leaves_after_s
        try:
            await asyncio.wait_for(waiting.news.wait(), max(min(stalls_at, leaves_at) - now, 0.001))
        except TimeoutError:
            now = time.monotonic()
            if answer.outcome is not None:
                return
            if leaves_after_s is not None and now >= leaves_at:
                answer.end(Outcome.LEFT)
            elif now >= answer.news_at + self._stall_s:
                answer.longest_silence_s = self._stall_s
                answer.end(Outcome.FORGOTTEN, f"nothing for {self._stall_s:g} s")

    async def _take_outputs(self) -> None:
        while True:
            outputs = await self.dispatcher.outputs()
            now = time.monotonic()
            for delta in outputs.deltas:
                waiting = self._waiting.get(delta.request_id)
                if waiting is not None:
                    self._judge_gap(waiting.answer, delta, now)
                    waiting.answer.take(delta, now)
                    if waiting.answer.outcome is not None or delta.position == 0:
                        waiting.news.set()

    def _judge_gap(self, answer: Answer, delta: TokenDelta, now: float) -> None:
        # With prefill workers, the time to the first token depends on their queue, and is not judged.
        if answer.received or self._jobs is None:
            request_id = answer.task.request_id
            live = self.dispatcher.table.requests.get(request_id)
            place = None if live is None else live.log.worker
            self._gaps.ended(request_id, place, answer.news_at, now, waits_of(delta))

    def _lost(self, live: LiveRequest) -> None:
        waiting = self._waiting.get(live.request_id)
        if waiting is None or live.log.worker is None:
            return
        fruitless = live.log.position == live.recovery.epoch_start
        kind = self._gaps.lost(live.request_id, live.log.worker, waiting.answer.news_at if fruitless else None)
        if kind is not None and kind in DEADLY:
            waiting.answer.deaths += 1
            if waiting.answer.deaths >= COMPANY_DEATHS:
                self._gaps.suspected(live.request_id, kind, time.monotonic())

    def _circumstances(self, request_id: str) -> str:
        live = self.dispatcher.table.requests.get(request_id)
        ready = len(self.fleet.view.routable())
        known = (
            "not live"
            if live is None
            else f"epoch {live.log.epoch}, worker {live.log.worker}, avoid {live.recovery.avoid}"
        )
        return f"{known}, {ready} workers ready"

    def _live(self) -> str:
        return "; ".join(f"{name}: {self._circumstances(name)}" for name in list(self.dispatcher.table.requests)[:5])
