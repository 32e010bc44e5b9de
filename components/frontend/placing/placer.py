"""Gives requests to workers: asks which worker is to take a request, waits for one if need be, and submits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec

from components.frontend.placing.assigner import Assigner
from components.frontend.requests.live_requests import LiveRequest, LiveRequests
from components.frontend.worker_link import WorkerLink
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.fleet.view import Breakers
from dynamo_local.core.messages.presence import EngineInfo
from dynamo_local.core.messages.routing import Assignment, AssignRequest
from dynamo_local.core.messages.work import RequestEpoch, Submit
from dynamo_local.core.ports import Request
from dynamo_local.core.priority.fair_queue import Claim, in_turn
from dynamo_local.core.request.recovery import RecoveryDeadlines, backoff_s
from dynamo_local.core.routing.caches.block_keys import pack_hashes
from dynamo_local.engine.mocker.blocks import chain_hashes, root_hash


class Placer:
    """Places the requests of one frontend. Keeps the assigner's account of which worker has which request."""

    def __init__(
        self,
        requests: LiveRequests,
        link: WorkerLink,
        fleet: FleetWatch,
        assigner: Assigner,
        deadlines: RecoveryDeadlines,
    ) -> None:
        self._requests = requests
        self._link = link
        self._fleet = fleet
        self._assigner = assigner
        self.deadlines = deadlines
        self.breakers = Breakers()
        """The workers that are avoided because they failed requests lately."""
        self._line = WaitingLine()
        """Requests that wait for a change of the fleet."""
        self.waiting = 0
        """Number of requests that wait for a worker."""
        self.on_wait: Callable[[], None] = lambda: None
        """Called when a request begins to wait."""

    def fleet_changed(self) -> None:
        """Have requests that wait for a worker ask again, the most urgent first."""
        self._line.wake()

    def is_routable(self, worker: str | None) -> bool:
        """Return whether the worker takes requests."""
        return any(presence.lease == worker for presence in self._fleet.view.routable())

    async def assign(self, live: LiveRequest) -> str | None:
        """Return the worker to take the request; None if none became routable in time, or the request has ended."""
        await asyncio.sleep(backoff_s(live.recovery.fruitless))
        begin = time.monotonic()
        while True:
            # Joined before asking, so that no change between the answer and the wait is missed.
            with self._line.joined(live.request) as changed:
                live.assignment = await self._assigner.assign(await self._question(live))
                self._explain(live, live.assignment)
                worker = live.assignment.worker
                # A worker that is set apart takes requests again soon.
                first = live.log.epoch == 0 and not self._fleet.view.exclusive()
                deadline_s = self.deadlines.placement_s if first else self.deadlines.recovery_s
                remaining = begin + deadline_s - time.monotonic()
                if worker is not None or remaining <= 0 or not self._requests.is_live(live):
                    return worker
                self.waiting += 1
                try:
                    self.on_wait()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(min(remaining, self.deadlines.ask_again_s)):
                            await changed
                finally:
                    self.waiting -= 1

    async def reassign(self, live: LiveRequest, worker: str) -> None:
        """Have the request charged to this worker, which was chosen without asking."""
        await self._assigner.reassign(live.request_id, worker, live.tokens)

    async def release(self, live: LiveRequest) -> None:
        """Have the request charged to no worker."""
        await self._assigner.release(live.request_id)

    async def send(self, live: LiveRequest, current: RequestEpoch, worker: str) -> None:
        """Submit the request to the worker, from the end of its log on. Raises BusError."""
        work = self.submission(live, current)
        source = self._source(live, worker)
        if source is not None:
            work = msgspec.structs.replace(work, source=source)
        await self._link.submit(worker, work)

    async def prefilled(self, live: LiveRequest) -> None:
        """Note that the request's worker has sent the first token of its epoch."""
        await self._assigner.prefilled(live.request_id)

    def submission(self, live: LiveRequest, current: RequestEpoch, at_most: int | None = None) -> Submit:
        """Return the request as a worker is given it, to generate `at_most` further tokens. Begins the epoch."""
        request, log = live.request, live.log
        live.recovery.begin_epoch(log.position, time.monotonic())
        return Submit(
            request_id=current.request_id,
            epoch=current.epoch,
            frontend=self._link.frontend,
            token_ids=[*request.prompt_token_ids, *log.tokens],
            sampling=msgspec.Raw(request.sampling(log.position, at_most)),
            position=log.position,
            arrival_time=request.arrival_time,
            priority=request.priority,
            key=request.key,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            reasoning_ended=request.reasoning_ended,
            reasoning_parser_kwargs=request.reasoning_parser_kwargs,
            session_id=request.session_id,
            trace_headers=None if request.trace_headers is None else dict(request.trace_headers),
            exclusive=live.recovery.standing.suspect,
            pools=request.pools,
        )

    def _source(self, live: LiveRequest, worker: str) -> str | None:
        """The worker from which the KV of the request's context is to be pulled."""
        held, assignment = live.prefill.held, live.assignment
        if held is not None:
            return held.worker if held.worker != worker else None
        return assignment.pull_from if assignment is not None and assignment.worker == worker else None

    async def _question(self, live: LiveRequest) -> AssignRequest:
        blocks, block_tokens = NO_BLOCKS
        if self._assigner.needs_blocks:
            context = [*live.request.prompt_token_ids, *live.log.tokens]
            blocks, block_tokens = await blocks_of(live.request, context, self._fleet)
        return AssignRequest(
            request_id=live.request_id,
            frontend=self._link.frontend,
            tokens=live.tokens,
            avoid=(*live.recovery.avoid, *self.breakers.open(time.monotonic())),
            blocks=blocks,
            block_tokens=block_tokens,
            explain=live.notes is not None,
        )

    def _explain(self, live: LiveRequest, assignment: Assignment) -> None:
        if live.notes is not None and assignment.route is not None and assignment.worker is not None:
            live.notes.note(assignment.route, self._name)

    def _name(self, lease: str) -> str:
        presence = self._fleet.view.get(lease)
        return lease if presence is None else presence.watcher


# Requests that wait for a worker, woken in the order in which an engine would serve them.


class WaitingLine:
    """Requests of one frontend that ask again when the fleet has changed."""

    def __init__(self) -> None:
        self._requests: dict[asyncio.Future[None], Request] = {}

    @contextmanager
    def joined(self, request: Request) -> Iterator[asyncio.Future[None]]:
        """Let a request stand in the line. Gives a future that is done with the next call of `wake`."""
        woken = asyncio.get_running_loop().create_future()
        self._requests[woken] = request
        try:
            yield woken
        finally:
            del self._requests[woken]

    def wake(self) -> None:
        """Wake all that stand in the line. Those that are waiting go on in order."""
        waiting = [woken for woken in self._requests if not woken.done()]
        if len(waiting) > 1:
            waiting = in_turn(waiting, self._claim, lambda woken: len(self._requests[woken].prompt_token_ids))
        for woken in waiting:
            woken.set_result(None)

    def _claim(self, woken: asyncio.Future[None], number: int) -> Claim:
        request = self._requests[woken]
        return Claim(request.priority, request.arrival_time, number, request.key)


# Which blocks a request's context has, as a router asks it.

_IN_A_THREAD = 4_096
"""Contexts of more tokens are hashed in a thread: 2 ms of the event loop at most."""

_MOCKER = "mocker"
"""Its name in presences. All other engines are vLLM's."""

NO_BLOCKS = (b"", 0)


async def blocks_of(request: Request, token_ids: Sequence[int], fleet: FleetWatch) -> tuple[bytes, int]:
    """Return the keys of the full blocks of a context, packed, and the tokens of a block; NO_BLOCKS if the workers do
    not all name blocks alike, or have started none."""
    engine = _engine_of_all(fleet)
    if engine is None or request.hashes is None or len(token_ids) <= engine.block_size:
        return NO_BLOCKS
    if len(token_ids) > _IN_A_THREAD:
        hashes = await asyncio.to_thread(_hashes, request, token_ids, engine)
    else:
        hashes = _hashes(request, token_ids, engine)
    return pack_hashes(hashes), engine.block_size


def _engine_of_all(fleet: FleetWatch) -> EngineInfo | None:
    """What the routable workers have in common, if they name blocks alike."""
    engines = [worker.engine for worker in fleet.view.routable()]
    kinds = {None if engine is None else (engine.engine, engine.block_size) for engine in engines}
    return engines[0] if len(kinds) == 1 else None


def _hashes(request: Request, token_ids: Sequence[int], engine: EngineInfo) -> list[bytes]:
    if engine.engine == _MOCKER:
        root = root_hash(request.cache_salt, request.adapter)
        return chain_hashes(token_ids, root, engine.block_size, len(token_ids) // engine.block_size)
    assert request.hashes is not None
    return request.hashes(token_ids, engine.block_size)
