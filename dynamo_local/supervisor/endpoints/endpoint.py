"""Brings one endpoint to what is ordered of it: observes its revisions, asks core/endpoints/rollout.py for the next
steps, and has its revisions carry them out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dynamo_local.core.endpoints import registry as registries
from dynamo_local.core.endpoints.registry import Entry, Registry
from dynamo_local.core.endpoints.rollout import (
    End,
    Forget,
    Launch,
    Ordered,
    Plan,
    Retire,
    Revert,
    Seen,
    Settle,
    Start,
    next_steps,
)
from dynamo_local.core.endpoints.served import served_names
from dynamo_local.core.endpoints.status import status_of
from dynamo_local.core.errors import DynamoError
from dynamo_local.core.messages.endpoints import BoardRevision, EndpointStatus, ServedAdapter
from dynamo_local.core.names import Revision
from dynamo_local.core.planning.actions import AddWorker
from dynamo_local.supervisor.endpoints.kept_registry import KeptRegistry
from dynamo_local.supervisor.endpoints.observing import Room, revisions_of
from dynamo_local.supervisor.endpoints.revision import RevisionRun, RevisionTools
from dynamo_local.supervisor.server.report import Report, ReportOnce
from state.model import State

_EVERY_S = 1.0
"""Time between two looks at an endpoint of which nothing is heard."""


@dataclass(frozen=True)
class EndpointTools:
    """What the endpoints of one server have in common.

    `room(state, wanted)`: for how many of these workers there are devices. `publish`: write the board now. `touch`:
    write it soon. `happened(endpoint, what, why)`: for the event log and the terminal.
    """

    kept: KeptRegistry
    revisions: RevisionTools
    room: Callable[[State, Sequence[AddWorker]], Awaitable[Room]]
    publish: Callable[[], Awaitable[None]]
    touch: Callable[[], None]
    happened: Callable[[str, str, str], None]
    report: Report
    wall_clock: Callable[[], float]
    clock: Callable[[], float] = time.monotonic


class EndpointRun:
    """An endpoint with workers of its own, from its order until nothing is left of it."""

    def __init__(self, entry: Entry, tools: EndpointTools) -> None:
        self.entry = entry
        """The last order."""
        self.deleting = False
        self.replace = False
        """Whether the update under way may end the old revision before the new one is ready."""
        self.takes: int | None = None
        self._tools = tools
        self._workers: int | None = None
        self._prefill_workers: int | None = None
        self._revisions: dict[int, RevisionRun] = {}
        self._listed: tuple[int, ...] = ()
        self._seen: Mapping[int, Seen] = {}
        self._woken = asyncio.Event()
        self._note = ""
        self._began_at = tools.clock()
        self._failure = ReportOnce(tools.report)
        self._state = ""

    @property
    def name(self) -> str:
        return self.entry.spec.name

    # Orders.

    def order(self, entry: Entry, *, replace: bool = False) -> None:
        """Take a changed entry of the registry."""
        if entry.revision != self.entry.revision:
            self.replace, self._note, self._began_at = replace, "", self._tools.clock()
        self.entry = entry
        for run in self._revisions.values():
            run.try_again()
        self.wake()

    def scale(self, workers: int | None, prefill_workers: int | None) -> None:
        """Order so many workers; None: as many as before. Bounds are kept."""
        if workers is not None:
            self._workers = workers
        if prefill_workers is not None:
            self._prefill_workers = prefill_workers
        self.wake()

    def delete(self) -> None:
        """Order the end of the endpoint."""
        self.deleting = True
        for run in self._revisions.values():
            run.begin_drain()
        self.wake()

    def wake(self) -> None:
        """Look at once."""
        self._woken.set()

    @property
    def answers(self) -> bool:
        """Whether the revision that is ordered takes requests."""
        return self.takes == self.entry.revision

    # What is shown.

    @property
    def ordered(self) -> Ordered:
        """What is ordered now."""
        spec, earlier = self.entry.spec, self.entry.earlier
        return Ordered(
            self.entry.revision,
            None if earlier is None else earlier.revision,
            _within(self._workers, spec.min_workers, spec.most_workers),
            _within(self._prefill_workers, spec.min_prefill_workers, spec.most_prefill_workers)
            if spec.disaggregated
            else 0,
            replace=self.replace,
            deleting=self.deleting,
        )

    def status(self) -> EndpointStatus:
        """State and reason now."""
        return status_of(self.ordered, self._seen, self.takes, self._note)

    def board(self, adapters: Sequence[ServedAdapter]) -> tuple[BoardRevision, ...]:
        """The revisions that frontends are to serve."""
        return tuple(
            BoardRevision(str(Revision(self.name, number)), number == self.takes, self._names(number), tuple(adapters))
            for number in self._listed
        )

    def _names(self, number: int) -> tuple[str, ...]:
        run = self._revisions.get(number)
        spec = self.entry.spec if run is None or run.spec is None else run.spec
        return served_names(spec)

    # The loop.

    async def run(self) -> None:
        """Bring what there is to what is ordered, until nothing is left of the endpoint after its deletion."""
        while True:
            self._woken.clear()
            try:
                if await self._round():
                    return
            except DynamoError as error:
                self._failure.note(f"endpoint {self.name} cannot be looked after for now: {error}")
            else:
                self._failure.note("")
            with suppress(TimeoutError):
                async with asyncio.timeout(_EVERY_S):
                    await self._woken.wait()

    async def _round(self) -> bool:
        """Returns whether nothing is left."""
        self._know_revisions()
        ordered = self.ordered
        state = await asyncio.to_thread(self._tools.revisions.read_state)
        for number in revisions_of(state, self.name) - self._revisions.keys():
            self._revisions[number] = self._run_of(number)
        current = self._revisions.get(ordered.revision)
        lacking = () if current is None else current.wanted(ordered.workers, ordered.prefill_workers, state)
        room = await self._tools.room(state, lacking) if lacking else Room()
        self._seen = {
            number: run.seen(state, room if run is current else Room()) for number, run in self._revisions.items()
        }
        plan = next_steps(ordered, self._seen, self.takes)
        await self._show(plan)
        for step in plan.steps:
            match step:
                case Launch() | Start() | Retire() | End():
                    self._revisions[step.revision].carry_out(step)
                case Settle():
                    await self._settle(ordered.revision)
                case Revert():
                    await self._revert(ordered, step.why)
                case Forget():
                    await self._forget(tuple(self._revisions))
                    return True
        await self._forget([n for n, seen in self._seen.items() if seen.is_gone and n not in self.entry.revisions])
        return False

    def _know_revisions(self) -> None:
        specs = {self.entry.revision: self.entry.spec}
        if self.entry.earlier is not None:
            specs[self.entry.earlier.revision] = self.entry.earlier.spec
        for number, spec in specs.items():
            run = self._revisions.setdefault(number, self._run_of(number))
            run.spec = spec

    def _run_of(self, number: int) -> RevisionRun:
        return RevisionRun(Revision(self.name, number), self._tools.revisions, self.wake)

    async def _show(self, plan: Plan) -> None:
        """Put the plan on the board, before anything is done. Raises StateError; then nothing has changed."""
        before = self.takes, self._listed
        self.takes, self._listed = plan.takes, plan.listed
        if before != (self.takes, self._listed):
            try:
                await self._tools.publish()
            except DynamoError:
                self.takes, self._listed = before
                raise
        if self.takes is not None:
            self._revisions[self.takes].took_requests = True
        self._tell(before[0])
        self._tools.touch()

    def _tell(self, took: int | None) -> None:
        """Note a change of state."""
        status = self.status()
        if self.takes is not None and self.takes != took:
            after_s = self._tools.clock() - self._began_at
            self._tools.happened(self.name, f"revision {self.takes} is ready after {after_s:.1f} s", "")
        if status.state != self._state and status.state in ("failed", "waiting"):
            self._tools.happened(self.name, status.state, status.reason)
        self._state = status.state

    async def _settle(self, revision: int) -> None:
        await self._change(lambda registry: registries.settle(registry, self.name, revision))
        self._tools.happened(self.name, f"update settled: revision {revision} answers", "")

    async def _revert(self, ordered: Ordered, why: str) -> None:
        revision, now = ordered.revision, self._tools.wall_clock()
        await self._change(lambda registry: registries.revert(registry, self.name, revision, now))
        # Otherwise another update has been ordered meanwhile, in its place.
        if self.entry.revision == ordered.previous:
            self._note = f"the update to revision {revision} failed, revision {ordered.previous} stays: {why}"
            self._tools.happened(self.name, f"update reverted to revision {ordered.previous}", why)

    async def _change(self, change: Callable[[Registry], Registry]) -> None:
        """Change the endpoint's entry in the registry, unless it was deleted meanwhile."""
        name = self.name
        registry = await self._tools.kept.change(lambda before: change(before) if name in before.entries else before)
        self.entry = registry.entries.get(name, self.entry)
        self.replace = self.replace and self.entry.earlier is not None
        self.wake()

    async def _forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            await self._revisions.pop(number).forget()


def _within(wanted: int | None, least: int, most: int) -> int:
    return least if wanted is None else max(least, min(wanted, most))
