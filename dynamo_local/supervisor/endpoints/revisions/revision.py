"""One revision of an endpoint: what the server remembers of it, and the steps that are carried out for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dynamo_local.core.endpoints.rollout import (
    BreakOff,
    End,
    Frontends,
    Launch,
    Park,
    Retire,
    RevisionStep,
    Seen,
    Start,
    UnderWay,
    Wake,
    Workers,
    back_off_s,
)
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import ConfigError, DynamoError, MemoryShortError, UsageError, one_line
from dynamo_local.core.fleet.view import FleetView
from dynamo_local.core.names import Revision
from dynamo_local.core.planning.actions import ActionOutcome, AddWorker, DeviceLimits, RemoveWorker
from dynamo_local.supervisor.endpoints.revisions.launch import Launched, ModelChangedError, check_files
from dynamo_local.supervisor.endpoints.revisions.observing import (
    RevisionWatch,
    doing,
    frontends_of,
    workers_of,
)
from dynamo_local.supervisor.endpoints.revisions.parking import NotDone, answers_of, until
from dynamo_local.supervisor.places.capacity import Startable
from dynamo_local.supervisor.server.launch.templates import ServiceTemplate
from state.statefile.model import State

if TYPE_CHECKING:
    from dynamo_local.supervisor.endpoints.endpoint import EndpointRun
    from dynamo_local.supervisor.endpoints.parts import EndpointParts

_log = logging.getLogger(__name__)

_ANNOUNCED_WITHIN_S = 5.0
"""Time in which a worker that has answered announces what it has answered."""
_PARK_AGAIN_S = 2.0
"""Time until a worker that has refused to park is asked again."""
_WAKES = 2
"""Failures after which a worker that cannot be woken is ended, and another one started in its place."""


class RevisionRun:
    """A revision while the server runs. Its endpoint looks when there may be something to do."""

    def __init__(self, name: Revision, parts: EndpointParts, endpoint: EndpointRun) -> None:
        self.name = name
        self.spec: EndpointSpec | None = None
        """None for a revision that is not ordered any more."""
        self.launched: Launched | None = None
        self.took_requests = False
        self._parts = parts
        self._endpoint = endpoint
        self._watch: RevisionWatch | None = None
        self._under_way: UnderWay = ""
        self._task: asyncio.Task[None] | None = None
        self._failures = 0
        self._repeated = False
        """Whether a start was repeated that had failed without a reason."""
        self._error = ""
        self._is_hopeless = False
        self._may_start_at = 0.0
        self._may_park_at = 0.0
        self._not_woken: dict[str, int] = {}
        """By watcher, how often in a row it could not be woken."""
        self._lost: dict[str, str] = {}
        """Workers that cannot be woken, each with the reason."""
        self._without_device: set[str] = set()
        """Those of them whose devices are gone: others take their place, and nothing has failed."""
        self._short_of_memory = ""
        """Why its parked workers have not been woken."""
        self._untried = ""
        """Why the last start has not begun: nothing could be reserved for it."""
        self._heard = asyncio.Event()
        self._doing = ""
        self._renewed_for: Mapping[str, str] | None = None
        """The model's files with which another revision was made last."""
        self._drained_by: float | None = None
        self._unserved_since: float | None = None

    # What there is of it.

    def wanted(self, workers: int, prefill_workers: int, state: State) -> tuple[ServiceTemplate, ...]:
        """The templates of the workers that lack, of those wanted. None of a revision that ends: its templates may be
        gone."""
        if self._under_way == "ending":
            return ()
        present = self.workers(state)
        answering, prefill = workers - present[0].present, prefill_workers - present[1].present
        return (*self._templates(answering, prefill=False), *self._templates(prefill, prefill=True))

    def amounts(self, workers: int, prefill_workers: int, state: State) -> tuple[float, ...]:
        """What the workers that lack take of devices: their number, or the share of one."""
        return tuple(template.device_count for template in self.wanted(workers, prefill_workers, state))

    def workers(self, state: State) -> tuple[Workers, Workers]:
        """The workers that answer, and those that prefill."""
        return workers_of(state, self.name, self._view, {**self._parts.server.given_up, **self._lost})

    @property
    def frontends(self) -> Frontends:
        """The frontends that serve it, and those that do not yet."""
        return frontends_of(self._view, self._parts.server.members(), self._parts.server.launch.graph.root.workers)

    @property
    def served(self) -> int:
        """A number that changes with each request that its workers get."""
        return sum(0 if one.counts is None else one.counts.requests or 0 for one in self._view.members())

    @property
    def is_nearly_ready(self) -> bool:
        """Whether the engine of one of its workers has started."""
        return any(one.engine is not None for one in self._view.members())

    @property
    def failed_adapters(self) -> Mapping[str, str]:
        """The adapters that one of its workers cannot load, by `ServedAdapter.key`, each with the reason."""
        return {key: why for one in self._view.members() for key, why in one.failed_adapters.items()}

    @property
    def model_folder(self) -> str:
        """The folder of its model; empty: it is not known."""
        return "" if self.launched is None else next(iter(self.launched.files), "")

    @property
    def is_busy(self) -> bool:
        """Whether a step is under way."""
        return bool(self._under_way)

    def seen(self, state: State, startable: Startable) -> Seen:
        """What is observed now."""
        workers, prefill = self.workers(state)
        frontends = self.frontends
        self._check_frontends(bool(workers.ready), frontends)
        now = self._parts.clock()
        if startable.gone and not self._under_way and now >= self._may_start_at:
            self._fail(startable.gone)
        return Seen(
            launched=self.launched is not None,
            under_way=self._under_way,
            workers=workers,
            prefill=prefill,
            frontends=frontends,
            waits_for_frontends=not self._frontends_are_late,
            room=startable.workers,
            failures=self._failures,
            error=self._error,
            is_hopeless=self._is_hopeless,
            may_start=now >= self._may_start_at,
            may_park=now >= self._may_park_at,
            took_requests=self.took_requests,
            drain_is_over=self._drained_by is not None and now >= self._drained_by,
            doing=self._doing if self._under_way == "launching" else doing(self._view),
            shortage=startable.shortage or self._untried,
            not_woken=self._short_of_memory,
        )

    def begin_drain(self) -> None:
        """Give its requests their last time to finish. Nothing is changed by another call."""
        if self._drained_by is None:
            self._drained_by = self._parts.clock() + self._parts.server.settings.drain_deadline_s

    def try_again(self) -> None:
        """Forget its failures: something was ordered that may help."""
        self._failures, self._error, self._is_hopeless, self._may_start_at = 0, "", False, 0.0
        self._may_park_at = 0.0
        self._repeated, self._short_of_memory = False, ""

    @property
    def _view(self) -> FleetView:
        return FleetView() if self._watch is None else self._watch.view

    @property
    def _frontends_are_late(self) -> bool:
        since = self._unserved_since
        return since is not None and self._parts.clock() - since > self._parts.server.settings.ready_deadline_s

    def _check_frontends(self, has_worker: bool, frontends: Frontends) -> None:
        """Give the revision up if a frontend cannot serve it, or does not become ready in time."""
        why = frontends.failure
        now = self._parts.clock()
        if not has_worker or frontends.are_ready or self.took_requests:
            self._unserved_since = None
        elif self._unserved_since is None:
            self._unserved_since = now
        elif self._frontends_are_late and not frontends.ready:
            why = f"no frontend was ready for it within {self._parts.server.settings.ready_deadline_s:g} s"
        if why and not self.took_requests and not self._is_hopeless:
            self._fail(why, is_hopeless=True)

    # Steps. Each runs in a task of its own.

    def carry_out(self, step: RevisionStep) -> None:
        """Begin a step. `End` and `BreakOff` break off the one under way."""
        match step:
            case Launch():
                self._begin("launching", self._launch())
            case Start():
                self._begin("starting", self._start(step))
            case Park():
                self._begin("parking", self._park(step))
            case Wake():
                self._begin("waking", self._wake(step))
            case BreakOff():
                self._begin("retiring", self._break_off(self._task))
            case Retire():
                self._begin("retiring", self._retire(step))
            case End():
                self._begin("ending", self._end(self._task))

    async def forget(self) -> None:
        """Stop to observe it."""
        if self._watch is not None:
            await self._watch.stop()
            self._watch = None

    def _begin(self, what: UnderWay, work: Coroutine[Any, Any, None]) -> None:
        self._under_way = what
        self._task = self._parts.tasks.spawn(f"{what} {self.name}", self._guarded(what, work))

    async def _guarded(self, what: UnderWay, work: Awaitable[None]) -> None:
        try:
            await work
        except DynamoError as error:
            self._fail(str(error), is_hopeless=isinstance(error, UsageError) and what == "launching")
        except Exception as error:
            # A model's files, and libraries that read them, may raise anything: that concerns this endpoint alone.
            if what != "launching":
                raise
            _log.exception("%s cannot be launched", self.name)
            self._fail(f"{type(error).__name__}: {' '.join(str(error).split())}", is_hopeless=True)
        finally:
            if self._under_way == what:
                self._under_way = ""
            self._endpoint.look()

    async def _launch(self) -> None:
        assert self.spec is not None, "only a revision that is ordered is launched"
        await self._observe()
        launched = await self._parts.launcher.launch(self.name, self.spec, self._note)
        await self._parts.files.create(self.name, launched)
        self.launched, self._doing = launched, ""
        self.try_again()

    async def _observe(self) -> None:
        if self._watch is None:
            self._watch = self._parts.watch(self.name, self._on_change)
            await self._watch.start()

    def _on_change(self) -> None:
        self._heard.set()
        self._endpoint.look()

    def _note(self, what: str) -> None:
        self._doing = what
        self._endpoint.look()

    async def _start(self, step: Start) -> None:
        assert self.launched is not None, "only what is launched is started"
        self._untried = ""
        try:
            await asyncio.to_thread(check_files, self.launched.files)
        except ModelChangedError as error:
            await self._renew(error)
            return
        await self._parts.memory.require(self.name, lambda: self._check_room(step))
        templates = (
            *self._templates(step.workers, prefill=False),
            *self._templates(step.prefill_workers, prefill=True),
        )
        changes = await asyncio.to_thread(self._on_nodes, templates)
        actuator = await self._parts.actuator(self.name.endpoint)
        self._judge(await actuator.apply_all(changes, DeviceLimits()))

    def _on_nodes(self, templates: Sequence[ServiceTemplate]) -> tuple[AddWorker, ...]:
        """The workers that may start now, each on the node that is decided for it. Blocks."""
        amounts = [template.device_count for template in templates]
        nodes = self._parts.turns.nodes(self.name.endpoint, self._parts.server.registration.read(), amounts)
        # Fewer nodes: the others are not to start now.
        started = zip(templates, nodes, strict=False)
        return tuple(AddWorker(one.role, one.service, str(self.name), node) for one, node in started)

    async def _renew(self, error: ModelChangedError) -> None:
        """Have another revision take over, with which all workers load the files that are there now, if these can be
        run. Raises what their launch raises, and the error where it was tried before."""
        assert self.spec is not None, "only a revision that is ordered is started"
        if error.files == self._renewed_for:
            raise error
        try:
            await self._parts.launcher.launch(self.name, self.spec, self._note)
        except DynamoError:
            raise
        except Exception as failure:  # libraries that read a model's files may raise anything
            raise ConfigError(f"{error.cause}; they cannot be run: {one_line(failure)}") from failure
        self._doing, self._renewed_for = "", error.files
        await self._endpoint.renew(self.name.number)

    def _check_room(self, step: Start) -> None:
        assert self.launched is not None, "only what is launched is started"
        check, shared = self._parts.launcher.check_room, self._parts.memory.shared_bytes(self.name)
        check(self.launched, step.workers, prefill=False, shared=shared)
        check(self.launched, step.prefill_workers, prefill=True, shared=shared)

    def _templates(self, number: int, *, prefill: bool) -> tuple[ServiceTemplate, ...]:
        template = None if self.launched is None else self.launched.template(prefill=prefill)
        return () if template is None else (template,) * max(0, number)

    def _judge(self, outcomes: Sequence[ActionOutcome]) -> None:
        """Count a start in which every worker has failed. One without a name was not tried, as it had no device, unless
        its node cannot run anything."""
        failed = [one for one in outcomes if not one.done and (one.watcher is not None or one.node_failed)]
        if any(outcome.done for outcome in outcomes):
            self.try_again()
        if failed and all(outcome.unexplained for outcome in failed) and not self._repeated:
            # They were killed, maybe: those who wait are not told before it happens again.
            self._repeated = True
            _log.warning("%s: %s; it is started again", self.name, failed[-1].note)
        elif failed:
            self._fail(failed[-1].note)
        elif outcomes and not any(outcome.done for outcome in outcomes):
            # The cluster may not answer, or have no node that can run it.
            self._untried = outcomes[-1].note
            self._may_start_at = self._parts.clock() + self._parts.retry_s

    async def _park(self, step: Park) -> None:
        refused = await self._asked(step.watchers, parked=True)
        if refused:
            self._may_park_at = self._parts.clock() + _PARK_AGAIN_S
            _log.info(
                "%s: not parked: %s", self.name, ", ".join(f"{name}: {each.why}" for name, each in refused.items())
            )

    async def _wake(self, step: Wake) -> None:
        watchers = await self._with_devices(step.watchers)
        await self._require_memory_to_wake(len(watchers))
        not_done = await self._asked(watchers, parked=False)
        failed = {watcher: each for watcher, each in not_done.items() if each.reached}
        if not not_done and watchers:
            self._not_woken.clear()
            self.try_again()
        elif not failed:
            # Their processes have ended, and are started again; or the bus is. What is parked then is asked again.
            self._may_start_at = self._parts.clock() + self._parts.retry_s
        for watcher, each in failed.items():
            self._not_woken[watcher] = self._not_woken.get(watcher, 0) + 1
            if self._not_woken[watcher] >= _WAKES:
                self._lost[watcher] = f"{watcher} cannot be woken: {each.why}"
        if failed and not self._lost:
            # Once it is lost, its removal says so.
            watcher, each = next(iter(failed.items()))
            self._fail(f"{watcher} does not wake: {each.why}")

    async def _with_devices(self, watchers: Sequence[str]) -> tuple[str, ...]:
        """Those of these parked workers whose devices are there. The others are lost."""
        state = await asyncio.to_thread(self._parts.server.registration.read)
        for watcher in watchers:
            why = await asyncio.to_thread(self._parts.capacity.why_off, state.components.get(watcher))
            if why:
                self._lost[watcher] = f"{watcher} cannot be woken: {why}"
                self._without_device.add(watcher)
                _log.warning("%s; it ends, and another one starts if there is a device", self._lost[watcher])
        return tuple(watcher for watcher in watchers if watcher not in self._without_device)

    async def _require_memory_to_wake(self, number: int) -> None:
        """Raise MemoryShortError if the KV caches of so many workers do not fit, and note it."""
        launched, self._short_of_memory = self.launched, ""
        if launched is None:
            return
        try:
            await self._parts.memory.require(
                self.name, lambda: self._parts.launcher.check_room_to_wake(launched, number)
            )
        except MemoryShortError as error:
            self._short_of_memory = str(error)
            raise

    async def _asked(self, watchers: Sequence[str], *, parked: bool) -> dict[str, NotDone]:
        """Have workers park or wake, and wait until they have announced it. Returns by watcher why some have not."""
        state = await asyncio.to_thread(self._parts.server.registration.read)
        there = {name: state.components[name].lease for name in watchers if name in state.components}
        leases = {name: lease for name, lease in there.items() if lease is not None}
        asking = self._parts.parking.ask(self.name, leases, parked=parked)
        refused = await answers_of(asking, leases, lambda: self._view, self._heard)
        asked = {lease for name, lease in leases.items() if name not in refused}
        kind = "parked" if parked else "ready"

        def announced() -> bool:
            # Those that are gone announce nothing any more.
            return all(one.state == kind for one in self._view.members() if one.lease in asked)

        await until(announced, self._heard, _ANNOUNCED_WITHIN_S)
        return refused

    async def _retire(self, step: Retire) -> None:
        state = await asyncio.to_thread(self._parts.server.registration.read)
        there = [state.components[watcher] for watcher in step.watchers if watcher in state.components]
        changes = [RemoveWorker(worker.watcher_name, worker.role) for worker in there if worker.holds]
        reasons = {**self._parts.server.given_up, **self._lost}
        failed = [watcher for watcher in step.watchers if watcher not in self._without_device]
        given_up = [reasons[watcher] for watcher in failed if watcher in reasons]
        actuator = await self._parts.actuator(self.name.endpoint)
        await actuator.apply_all(changes, DeviceLimits())
        for watcher in step.watchers:
            self._lost.pop(watcher, None)
            self._not_woken.pop(watcher, None)
            self._without_device.discard(watcher)
        if given_up:
            self._fail(given_up[-1])

    async def _break_off(self, under_way: asyncio.Task[None] | None) -> None:
        await _cancel(under_way)
        actuator = await self._parts.actuator(self.name.endpoint)
        await actuator.break_off(str(self.name))

    async def _end(self, under_way: asyncio.Task[None] | None) -> None:
        await _cancel(under_way)
        # It ends once it has begun to: half of it could neither go on nor be started again.
        while not await self._is_removed():  # noqa: ASYNC110  # nothing tells that it would succeed
            await asyncio.sleep(self._parts.retry_s)
        self.launched, self.took_requests, self._drained_by, self._unserved_since = None, False, None, None
        self._doing = ""
        await self.forget()

    async def _is_removed(self) -> bool:
        """Remove workers and files. Returns whether nothing of them is left."""
        try:
            actuator = await self._parts.actuator(self.name.endpoint)
            await actuator.end_revision(str(self.name))
            await self._parts.files.remove(self.name)
        except DynamoError as error:
            _log.warning("%s is not ended yet: %s", self.name, error)
            return False
        return True

    def _fail(self, why: str, *, is_hopeless: bool = False) -> None:
        self._error, self._is_hopeless = why, self._is_hopeless or is_hopeless
        self._failures += 1
        self._may_start_at = self._parts.clock() + back_off_s(self._failures, answers=self.took_requests)
        self._parts.record.happened(self.name.endpoint, f"revision {self.name.number} cannot start", why)


async def _cancel(under_way: asyncio.Task[None] | None) -> None:
    if under_way is not None and not under_way.done():
        under_way.cancel()
        await asyncio.wait({under_way})
