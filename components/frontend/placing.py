"""Gives requests to workers: asks which worker is to take a request, waits for one if need be, and submits.

The router decides which, or, in a graph without one, the same policy here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import msgspec

from components.frontend.requests.live_requests import LiveRequest, LiveRequests
from components.frontend.worker_link import WorkerLink
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.errors import BusError, DecodeError
from dynamo_local.core.fleet.view import Breakers, Change, Happened
from dynamo_local.core.messages.presence import EngineInfo
from dynamo_local.core.messages.routing import (
    Account,
    Assignment,
    AssignRequest,
    Charge,
    Charged,
    Charges,
    Prefilled,
    Released,
)
from dynamo_local.core.messages.work import RequestEpoch, Submit
from dynamo_local.core.ports import Request
from dynamo_local.core.priority.fair_queue import Claim, in_turn
from dynamo_local.core.request.recovery import RecoveryDeadlines, backoff_s
from dynamo_local.core.routing.caches.index import pack_hashes
from dynamo_local.core.routing.explanation import route_row
from dynamo_local.core.routing.ledger import Ledger
from dynamo_local.core.routing.policies import LeastOutstandingTokens, RoutingPolicy
from dynamo_local.core.subjects import Subjects
from dynamo_local.engine.mocker.blocks import chain_hashes, root_hash

_log = logging.getLogger(__name__)


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


# Which worker takes a request.

_ROUTER_TIMEOUT_S = 1.0
_REPORT_CHARGES_EVERY_S = 5.0


class Assigner(Protocol):
    """Assigns requests to workers."""

    @property
    def needs_blocks(self) -> bool:
        """Whether questions are to say which blocks the requests' contexts have."""

    async def assign(self, request: AssignRequest) -> Assignment:
        """Choose the worker to take the request; none if no worker is routable."""

    async def prefilled(self, request_id: str) -> None:
        """Note that the request's first token has come. Never raises, like `release`."""

    async def release(self, request_id: str) -> None:
        """Charge the request to no worker. Never raises: at worst, a load is overestimated for a while."""

    async def reassign(self, request_id: str, worker: str, tokens: int) -> None:
        """Charge the request, with so many tokens of context, to this worker. Never raises, like `release`."""

    async def run(self) -> None:
        """Do what is to be done periodically, until cancelled."""


class LocalAssigner:
    """Applies a policy to this process's own view of the fleet and its own ledger."""

    def __init__(self, fleet: FleetWatch, frontend: str, policy: RoutingPolicy | None = None) -> None:
        self._fleet = fleet
        self._frontend = frontend
        self._policy = policy or LeastOutstandingTokens()
        self.ledger = Ledger()
        fleet.subscribe(self._on_change)

    @property
    def needs_blocks(self) -> bool:
        return self._policy.needs_blocks

    async def assign(self, request: AssignRequest) -> Assignment:
        choice = self._policy.choose(request, self._fleet.view.routable(), self.ledger, time.monotonic())
        if choice is None:
            return Assignment(None)
        self.ledger.charge(request.frontend, request.request_id, choice.worker, request.tokens, time.monotonic())
        assignment = Assignment(choice.worker)
        route = route_row(request, assignment, choice.costs) if request.explain else None
        return msgspec.structs.replace(assignment, route=route)

    async def prefilled(self, request_id: str) -> None:
        self.ledger.prefilled(self._frontend, request_id)

    async def release(self, request_id: str) -> None:
        self.ledger.release(self._frontend, request_id)

    async def reassign(self, request_id: str, worker: str, tokens: int) -> None:
        self.ledger.charge(self._frontend, request_id, worker, tokens, time.monotonic())

    async def run(self) -> None:
        return

    def knows(self, worker: str) -> bool:
        """Return whether the worker is in this frontend's view of the fleet."""
        return self._fleet.view.get(worker) is not None

    def _on_change(self, change: Change) -> None:
        if change.what in (Happened.LEFT, Happened.REVOKED):
            self.ledger.forget_worker(change.presence.lease)


class RouterAssigner:
    """Asks the router. If the router does not answer (while it restarts), `fallback` decides, so that no request
    waits."""

    def __init__(self, bus: Bus, subjects: Subjects, frontend: str, fallback: LocalAssigner) -> None:
        self._bus = bus
        self._subjects = subjects
        self._frontend = frontend
        self._fallback = fallback
        self._router_up = True
        self._needs_blocks = True

    @property
    def needs_blocks(self) -> bool:
        return self._needs_blocks

    async def assign(self, request: AssignRequest) -> Assignment:
        try:
            assignment = await self._bus.ask(self._subjects.assign, request, Assignment, timeout_s=_ROUTER_TIMEOUT_S)
        except (BusError, DecodeError) as error:
            self._note_router(False, str(error))
            return await self._fallback.assign(request)
        self._note_router(True)
        self._needs_blocks = assignment.needs_blocks
        worker = assignment.worker
        if worker is None:
            return assignment
        if not self._fallback.knows(worker):
            # The router's view of the fleet is older than this one: it has just started, or has hung.
            return await self._fallback.assign(request)
        uncached = None if assignment.cached is None else max(request.tokens - assignment.cached, 0)
        charge = Charge(request.request_id, worker, request.tokens, uncached, order=assignment.order)
        self._fallback.ledger.take_over(self._frontend, charge, time.monotonic())
        if assignment.tell:
            await self._tell(Charged(self._frontend, charge, request.blocks))
        return assignment

    async def prefilled(self, request_id: str) -> None:
        await self._fallback.prefilled(request_id)
        await self._tell(Prefilled(request_id, self._frontend))

    async def release(self, request_id: str) -> None:
        await self._fallback.release(request_id)
        await self._tell(Released(request_id, self._frontend))

    async def reassign(self, request_id: str, worker: str, tokens: int) -> None:
        await self._fallback.reassign(request_id, worker, tokens)
        await self._report_charges()

    async def run(self) -> None:
        """Report all charges to the router from time to time: it may have missed messages, or have restarted."""
        while True:
            await asyncio.sleep(_REPORT_CHARGES_EVERY_S)
            await self._report_charges()

    async def _report_charges(self) -> None:
        await self._tell(Charges(self._frontend, self._fallback.ledger.of_frontend(self._frontend, time.monotonic())))

    async def _tell(self, account: Account) -> None:
        """Tell all routers what has become of this frontend's load."""
        try:
            await self._bus.send(self._subjects.account, account)
        except BusError as error:
            _log.warning("routers were not told what runs where (%s); the next report corrects their view", error)

    def _note_router(self, up: bool, why: str = "") -> None:
        if up != self._router_up:
            self._router_up = up
            _log.warning("the router answers again" if up else f"assigning without the router: {why}")
