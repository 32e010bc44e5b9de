"""Brings one endpoint to what is ordered of it: observes its revisions, asks core/endpoints/rollout.py for the
next steps, and has its revisions carry them out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from dynamo_local.core.endpoints import registry as registries
from dynamo_local.core.endpoints.idling import Activity, Rest
from dynamo_local.core.endpoints.registry import Entry, Registry
from dynamo_local.core.endpoints.rollout import (
    GIVEN_UP_AFTER,
    Forget,
    Ordered,
    Plan,
    Revert,
    Seen,
    Settle,
    Workers,
    next_steps,
)
from dynamo_local.core.endpoints.spec import EndpointSpec, served_names
from dynamo_local.core.endpoints.status import status_of
from dynamo_local.core.errors import DynamoError
from dynamo_local.core.messages.endpoints import BoardRevision, EndpointStatus, ServedAdapter
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.names import Revision
from dynamo_local.supervisor.endpoints.awake import Idleness, Keeping, Kept
from dynamo_local.supervisor.endpoints.parts import EndpointParts
from dynamo_local.supervisor.endpoints.revisions.observing import revisions_of
from dynamo_local.supervisor.endpoints.revisions.revision import RevisionRun
from dynamo_local.supervisor.endpoints.turns import Turn, may_start, running
from dynamo_local.supervisor.places.capacity import Startable
from dynamo_local.supervisor.server.launch.templates import ServiceTemplate
from dynamo_local.supervisor.server.reports.report import ReportOnce
from state.statefile.model import State

_EVERY_S = 1.0
"""Time between two looks at an endpoint of which nothing is heard."""
_ASLEEP_EVERY_S = 5.0
"""The same for one that is asleep."""
_AT_LEAST_S = 0.01

_TOLD = {"failed": "endpoint", "waiting": "endpoint", "parked": "park", "asleep": "sleep"}
"""States that are noted in the event log, as events of these kinds."""


class EndpointRun:
    """An endpoint with workers of its own, from its order until nothing is left of it."""

    def __init__(self, entry: Entry, parts: EndpointParts) -> None:
        self.entry = entry
        """The last order."""
        self.deleting = False
        self.replace = False
        """Whether the update under way may end the old revision before the new one is ready."""
        self.takes: int | None = None
        self.turn = Turn()
        self._keeping = Keeping(parts.wall_clock)
        self._parts = parts
        self._workers: int | None = None
        self._prefill_workers: int | None = None
        self._revisions: dict[int, RevisionRun] = {}
        self._listed: tuple[int, ...] = ()
        self._seen: Mapping[int, Seen] = {}
        self.idleness = Idleness(entry.spec, parts.clock, parts.record.note)
        self._to_look = asyncio.Event()
        self._note = ""
        self._began_at = parts.clock()
        self._failure = ReportOnce(parts.server.report)
        self._state = ""

    @property
    def name(self) -> str:
        return self.entry.spec.name

    # Orders.

    def order(self, entry: Entry, *, replace: bool = False) -> None:
        """Take a changed entry of the registry."""
        if entry.revision != self.entry.revision:
            self.replace, self._note, self._began_at = replace, "", self._parts.clock()
        self.entry = entry
        self.idleness.update(entry.spec)
        for run in self._revisions.values():
            run.try_again()
        self.look()

    async def renew(self, revision: int) -> None:
        """Order another revision in place of that one, with the same spec: its model's files are others."""
        now = self._parts.wall_clock()
        await self._change(lambda registry: registries.renew(registry, self.name, revision, now))
        if self.entry.revision > revision:
            self.replace, self._note, self._began_at = False, "", self._parts.clock()
            what = f"its model's files have changed: revision {self.entry.revision} is to load them"
            self._parts.record.happened(self.name, what)

    def wake(self, *, asked: bool) -> None:
        """Have a worker ready, at once. `asked`: by a frontend that holds a request, otherwise by the owner.

        Raises SupervisorError to a frontend while a start that has failed is not to be repeated. Repeated, an order
        starts nothing more.
        """
        rested = self.idleness.wake(asked=asked)
        if rested or not asked:
            for run in self._revisions.values():
                run.try_again()
        self.look()

    def rest(self, rest: Rest) -> None:
        """Park the workers, or end them, once no request is under way."""
        self.idleness.order_rest(rest)
        self.look()

    @property
    def idle_since(self) -> float | None:
        """Since when it has had no request (CLOCK_MONOTONIC, s); None while it has one, or that is not known."""
        busy = self._busy()
        is_idle = busy is False and not self.idleness.is_waking
        return self.idleness.state.active_at if is_idle or (self.idleness.rest == "parked" and not busy) else None

    @property
    def running(self) -> int | None:
        """Requests under way, without those that are held; None if that is not known."""
        found = [run.frontends for run in self._revisions.values()]
        return None if self._busy() is None else running(found)

    @property
    def has_more_than_minimum(self) -> bool:
        """Whether it has workers that it may do without."""
        present = sum(seen.workers.present for seen in self._seen.values())
        return present > self.entry.spec.min_workers

    @property
    def is_changing(self) -> bool:
        """Whether another revision of it starts, or one ends."""
        others = (seen for number, seen in self._seen.items() if number != self.entry.revision)
        return self.entry.earlier is not None or self.deleting or not all(seen.is_gone for seen in others)

    def yield_to(self, other: str) -> None:
        """Give its devices to the endpoint `other`: it is asleep until it is asked for again."""
        if self.idleness.rest == "asleep":
            return
        self.idleness.yield_to(other)
        self.look()

    def give(self, watchers: Collection[str]) -> None:
        """Have so many of its workers end, beside which others stay."""
        current = self._seen.get(self.entry.revision, Seen())
        prefill = sum(watcher in _all(current.prefill) for watcher in watchers)
        self._workers = min(self.ordered.workers, current.workers.present - (len(watchers) - prefill))
        if prefill:
            self._prefill_workers = min(self.ordered.prefill_workers, current.prefill.present - prefill)
        self.look()

    @property
    def kept(self) -> bool:
        """Whether its schedule keeps it awake, or a forecast."""
        return bool(self.idleness.kept.awake)

    def may_start(self, *, freely: bool) -> None:
        """Look at once: what it waits for has changed. `freely`: devices are free for it."""
        if freely and self.kept and self.idleness.rest == "asleep":
            self._wake_for(self.idleness.kept)
        self.look()

    def _wake_for(self, kept: Kept) -> None:
        if self.idleness.wake(asked=False, kept=kept):
            for run in self._revisions.values():
                run.try_again()

    def scale(self, workers: int | None, prefill_workers: int | None) -> None:
        """Order so many workers; None: as many as before. Bounds are kept."""
        if workers is not None:
            self._workers = workers
        if prefill_workers is not None:
            self._prefill_workers = prefill_workers
        if workers == 0:
            self.rest("asleep")
        self.look()

    def delete(self) -> None:
        """Order the end of the endpoint."""
        self.deleting = True
        for run in self._revisions.values():
            run.begin_drain()
        self.look()

    def look(self) -> None:
        """Look at once."""
        self._to_look.set()

    @property
    def answers(self) -> bool:
        """Whether the revision that is ordered takes requests."""
        return self.takes == self.entry.revision

    # What is shown.

    @property
    def ordered(self) -> Ordered:
        """What is ordered now."""
        spec, earlier, idleness = self.entry.spec, self.entry.earlier, self.idleness
        has_workers = idleness.rest != "asleep"
        return Ordered(
            self.entry.revision,
            None if earlier is None else earlier.revision,
            _within(self._workers, spec.least_awake, spec.most_workers) if has_workers else 0,
            _within(self._prefill_workers, spec.min_prefill_workers, spec.most_prefill_workers)
            if spec.disaggregated and has_workers
            else 0,
            replace=self.replace,
            deleting=self.deleting,
            rest=idleness.rest,
            why=idleness.reason,
            waking=idleness.is_waking,
            wake_failed=idleness.failure,
        )

    def status(self) -> EndpointStatus:
        """State and reason now."""
        return status_of(self.ordered, self._seen, self.takes, self._note)

    def board(self, adapters: Callable[[EndpointSpec], Sequence[ServedAdapter]]) -> tuple[BoardRevision, ...]:
        """The revisions that frontends are to serve. `adapters`: those that a revision with this spec serves."""
        return tuple(
            BoardRevision(
                str(Revision(self.name, number)),
                number == self.takes,
                served_names(self._spec_of(number)),
                tuple(adapters(self._spec_of(number))),
                self.turn.yields if number == self.takes else "",
            )
            for number in self._listed
        )

    @property
    def model_folder(self) -> str:
        """The folder of the model of the revision that answers, or is to answer first; empty: it is not known."""
        run = self._revisions.get(self.entry.revision if self.takes is None else self.takes)
        return "" if run is None else run.model_folder

    @property
    def failed_adapters(self) -> Mapping[str, str]:
        """The adapters that one of its workers cannot load, by `ServedAdapter.key`, each with the reason."""
        return {key: why for run in self._revisions.values() for key, why in run.failed_adapters.items()}

    @property
    def spec_that_takes(self) -> EndpointSpec:
        """What the revision runs that takes requests; what is ordered, if none does."""
        return self.entry.spec if self.takes is None else self._spec_of(self.takes)

    def _spec_of(self, number: int) -> EndpointSpec:
        run = self._revisions.get(number)
        return self.entry.spec if run is None or run.spec is None else run.spec

    # The loop.

    async def run(self) -> None:
        """Bring what there is to what is ordered, until nothing is left of the endpoint after its deletion."""
        while True:
            self._to_look.clear()
            try:
                if await self._round():
                    return
            except DynamoError as error:
                self._failure.note(f"endpoint {self.name} cannot be looked after for now: {error}")
            else:
                self._failure.note("")
            with suppress(TimeoutError):
                async with asyncio.timeout(self._look_in_s()):
                    await self._to_look.wait()

    async def _round(self) -> bool:
        """Returns whether nothing is left."""
        state = await asyncio.to_thread(self._parts.server.registration.read)
        # From here on nothing is awaited until `ordered` is taken: orders come in between, with revisions of their own.
        self._know_revisions()
        self._look_at_use(state)
        ordered = self.ordered
        for number in revisions_of(state, self.name) - self._revisions.keys():
            self._revisions[number] = self._run_of(number)
        current = self._revisions.get(ordered.revision)
        lacking = () if current is None else current.wanted(ordered.workers, ordered.prefill_workers, state)
        startable = await self._startable(state, lacking)
        self._seen = {
            number: run.seen(state, startable if run is current else Startable())
            for number, run in self._revisions.items()
        }
        if self._has_failed_to_wake(ordered):
            # The next look, which is at once, sees that it is to be asleep.
            return False
        self._note_turn(ordered, state)
        plan = next_steps(ordered, self._seen, self.takes)
        await self._show(plan)
        for step in plan.steps:
            match step:
                case Settle():
                    await self._settle(ordered.revision)
                case Revert():
                    await self._revert(ordered, step.why)
                case Forget():
                    await self._forget(tuple(self._revisions))
                    return True
                case _:
                    self._revisions[step.revision].carry_out(step)
        await self._forget([n for n, seen in self._seen.items() if seen.is_gone and n not in self.entry.revisions])
        return False

    async def _startable(self, state: State, lacking: Sequence[ServiceTemplate]) -> Startable:
        if not lacking:
            return Startable()
        return await asyncio.to_thread(self._parts.turns.startable, self.name, state, lacking)

    # Turns on devices that other endpoints want as well.

    def _note_turn(self, ordered: Ordered, state: State) -> None:
        """Note what it lacks and since when, and whether its turn has begun."""
        spec, current = self.entry.spec, self._seen.get(ordered.revision, Seen())
        least = spec.least_awake, spec.min_prefill_workers if spec.disaggregated else 0
        wants = may_start(ordered, current, kept=self.kept)
        lacking = self._revisions[ordered.revision].amounts(*least, state) if wants else ()
        self.turn.note(lacking, current, self.idleness.state, self._parts.clock())
        self._parts.turns.looked(self)

    # Whether it is used.

    def _look_at_use(self, state: State) -> None:
        """Park it, or have it sleep, if it is not used."""
        run = self._revisions.get(self.entry.revision if self.takes is None else self.takes)
        workers = None if run is None else run.workers(state)[0]
        seen = Activity(
            self._busy(),
            0 if run is None else run.served,
            0 if workers is None else len(workers.ready),
            run is not None and workers is not None and (run.is_busy or workers.present > 0),
            run is not None and run.is_nearly_ready,
        )
        requests = max(0, seen.served - self.idleness.state.served)
        self._parts.usage.note(self.entry.spec, requests or int(bool(seen.busy)))
        self._look_at_schedule()
        self.idleness.look(seen)
        if self.idleness.rest == "asleep":
            # As many as it starts with, when it is woken.
            self._workers = self._prefill_workers = None

    def _look_at_schedule(self) -> None:
        """Wake it where its schedule says so. What is asleep and to be kept awake waits for devices that are free."""
        kept, before = self._keeping.look(self.entry.spec, self._parts.usage.of(self.name)), self.kept
        self.idleness.kept = kept
        if kept.due:
            self._wake_for(Kept())
        elif kept.awake and not before and self.idleness.rest == "parked":
            self._wake_for(kept)

    def _busy(self) -> bool | None:
        """Whether requests are under way or held; None if that is not known."""
        if self.takes is None or self.entry.earlier is not None or not self._revisions[self.takes].frontends.are_heard:
            return None
        numbers = [run.frontends.in_flight for run in self._revisions.values()]
        if any(numbers):
            return True
        return None if None in numbers else False

    def _has_failed_to_wake(self, ordered: Ordered) -> bool:
        """Whether a start has failed just now that is not repeated before somebody asks again. It is asleep then, or
        parked as it was."""
        current = self._seen.get(ordered.revision, Seen())
        if current.not_woken and ordered.rest == "awake" and not current.under_way and not current.workers.ready:
            self.idleness.fail(current.not_woken, "parked")
            self.look()
            return True
        if self.entry.spec.min_workers > 0 or ordered.rest != "awake" or not current.launched or current.under_way:
            return False
        most = 1 if ordered.waking else GIVEN_UP_AFTER
        if current.failures < most or current.is_hopeless or current.workers.present:
            return False
        self.idleness.fail(current.error)
        self.look()
        return True

    def _look_in_s(self) -> float:
        """Time until the next look if nothing is heard, in seconds."""
        is_quiet = self.idleness.rest == "asleep" and all(not seen.has_workers for seen in self._seen.values())
        every_s = _ASLEEP_EVERY_S if is_quiet and self.takes is not None else _EVERY_S
        return max(_AT_LEAST_S, self.idleness.look_in_s(every_s))

    def _know_revisions(self) -> None:
        specs = {self.entry.revision: self.entry.spec}
        if self.entry.earlier is not None:
            specs[self.entry.earlier.revision] = self.entry.earlier.spec
        for number, spec in specs.items():
            run = self._revisions.setdefault(number, self._run_of(number))
            run.spec = spec

    def _run_of(self, number: int) -> RevisionRun:
        return RevisionRun(Revision(self.name, number), self._parts, self)

    async def _show(self, plan: Plan) -> None:
        """Put the plan on the board, before anything is done. Raises StateError; then nothing has changed."""
        before = self.takes, self._listed
        self.takes, self._listed = plan.takes, plan.listed
        if before != (self.takes, self._listed):
            try:
                await self._parts.board.publish()
            except DynamoError:
                self.takes, self._listed = before
                raise
        if self.takes is not None:
            self._revisions[self.takes].took_requests = True
        self._tell(before[0])
        self._parts.board.touch()

    def _tell(self, took: int | None) -> None:
        """Note a change of state."""
        status = self.status()
        if self.takes is not None and self.takes != took:
            after_s = self._parts.clock() - self._began_at
            what = "is ready" if status.ready else "is checked"
            self._parts.record.happened(self.name, f"revision {self.takes} {what} after {after_s:.1f} s")
        if status.state != self._state and status.state in _TOLD:
            kind, cause = _TOLD[status.state], self.idleness.state.cause
            self._parts.record.note(Event(kind, status.state, status.reason, endpoint=self.name, cause=cause))
        self._state = status.state

    async def _settle(self, revision: int) -> None:
        await self._change(lambda registry: registries.settle(registry, self.name, revision))
        self._parts.record.happened(self.name, f"update settled: revision {revision} answers")

    async def _revert(self, ordered: Ordered, why: str) -> None:
        revision, now = ordered.revision, self._parts.wall_clock()
        await self._change(lambda registry: registries.revert(registry, self.name, revision, now))
        # Otherwise another update has been ordered meanwhile, in its place.
        if self.entry.revision == ordered.previous:
            self._note = f"the update to revision {revision} failed, revision {ordered.previous} stays: {why}"
            self._parts.record.happened(self.name, f"update reverted to revision {ordered.previous}", why)

    async def _change(self, change: Callable[[Registry], Registry]) -> None:
        """Change the endpoint's entry in the registry, unless it was deleted meanwhile."""
        name = self.name
        registry = await self._parts.kept.change(lambda before: change(before) if name in before.entries else before)
        self.entry = registry.entries.get(name, self.entry)
        self.idleness.update(self.entry.spec)
        self.replace = self.replace and self.entry.earlier is not None
        self.look()

    async def _forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            await self._revisions.pop(number).forget()


def _all(workers: Workers) -> tuple[str, ...]:
    return (*workers.ready, *workers.starting, *workers.parked)


def _within(wanted: int | None, least: int, most: int) -> int:
    return least if wanted is None else max(least, min(wanted, most))
