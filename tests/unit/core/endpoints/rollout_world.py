"""An endpoint in a simulated world: devices, workers, a frontend, a registry, and a server that may be killed."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from dynamo_local.core.endpoints import idling
from dynamo_local.core.endpoints import registry as registries
from dynamo_local.core.endpoints.checks import runs_differently
from dynamo_local.core.endpoints.idling import Activity, Idling
from dynamo_local.core.endpoints.registry import Registry
from dynamo_local.core.endpoints.rollout import (
    GIVEN_UP_AFTER,
    BreakOff,
    End,
    Forget,
    Frontends,
    Launch,
    Ordered,
    Park,
    Plan,
    Retire,
    Revert,
    RevisionStep,
    Seen,
    Settle,
    Start,
    UnderWay,
    Wake,
    Workers,
    next_steps,
)
from dynamo_local.core.endpoints.spec import EndpointSpec

NAME = "chat"


@dataclass
class SimulatedRevision:
    """A revision as it really is. `kind`: "good", or at which step it fails."""

    kind: str
    launched: bool = False
    ready: list[str] = field(default_factory=list)
    starting: list[str] = field(default_factory=list)
    parked: list[str] = field(default_factory=list)
    step: RevisionStep | None = None
    failures: int = 0
    is_hopeless: bool = False
    took_requests: bool = False
    frontend: str = ""
    in_flight: int = 0
    number_of_workers: int = 0

    @property
    def held(self) -> int:
        return len(self.ready) + len(self.starting) + len(self.parked)


@dataclass
class World:
    """`spec.model` says how a revision fails: "good", "launch", "start", or "frontend". A round takes a second."""

    random: Random
    devices: int
    spec: EndpointSpec
    registry: Registry = field(default_factory=Registry)
    revisions: dict[int, SimulatedRevision] = field(default_factory=dict)
    takes: int | None = None
    listed: tuple[int, ...] = ()
    workers: int = 1
    replace: bool = False
    deleting: bool = False
    drain_is_over: bool = False
    forgotten: bool = False
    plan: Plan = field(default_factory=Plan)
    now: float = 0.0
    idling: Idling = field(default_factory=Idling)
    starts: int = 0

    def __post_init__(self) -> None:
        self.registry = registries.create(Registry(), self.spec, 0.0)
        self.idling = idling.at_start(self.spec, self.now)

    # What happens.

    def update(self, kind: str, *, replaces: bool = False) -> None:
        if self.deleting:
            return
        entry = self.registry.entry(NAME)
        before = entry.revision
        if self.takes == entry.revision:
            self.registry = registries.settle(self.registry, NAME, entry.revision)
        was_first = self.registry.entry(NAME).earlier is None and self.takes is None
        count = int(entry.spec.labels.get("n", "0")) + 1
        changed = replace_spec(entry.spec, kind, count)
        self.registry = registries.update(self.registry, changed, 1.0)
        entry = self.registry.entry(NAME)
        if was_first:
            self.registry = registries.settle(self.registry, NAME, entry.revision)
        if entry.revision != before:
            self.replace = replaces
        self._changed()

    def _changed(self) -> None:
        """Follow the registry."""
        before, self.spec = self.spec, self.registry.entry(NAME).spec
        anew = runs_differently(before, self.spec)
        self.idling = idling.changed(self.idling, before, self.spec, self.now, runs_anew=anew)

    def wake(self, *, asked: bool) -> None:
        """An order to wake. A start that has failed is repeated for it."""
        rested = self.idling.rest
        self.idling = idling.woken(self.idling, self.now, asked=asked)
        if self.idling.rest != rested:
            for one in self.revisions.values():
                one.failures = 0

    def park(self) -> None:
        self.idling = idling.ordered_to_rest(self.idling, "parked")

    def delete(self) -> None:
        self.deleting = True

    def kill_worker(self) -> None:
        for one in self.revisions.values():
            if one.ready:
                one.starting.append(one.ready.pop())
                return
            if one.parked:
                one.starting.append(one.parked.pop())
                return

    def kill_frontend(self) -> None:
        for one in self.revisions.values():
            one.frontend, one.in_flight = "", 0

    def kill_server(self) -> None:
        """Everything ends with it, but the registry."""
        self.revisions.clear()
        self.takes, self.listed, self.replace = None, (), False
        self.forgotten = self.forgotten or self.deleting
        self.idling = idling.at_start(self.spec, self.now)

    def request(self) -> None:
        if self.takes is not None and self.revisions[self.takes].frontend == "ready":
            self.revisions[self.takes].in_flight += 1

    def answer(self) -> None:
        """A request is finished, which takes a worker. Frontends ask for one where there is none."""
        for number, one in self.revisions.items():
            if one.in_flight and one.ready:
                one.in_flight -= 1
            elif one.in_flight and number == self.takes:
                self.wake(asked=True)

    # Time passes.

    def pass_time(self, *, fair: bool = False) -> None:
        """Some of what is under way gets on; all of it if `fair`."""
        self.now += 1
        for number, one in list(self.revisions.items()):
            if fair or self.random.random() < 0.5:
                self._follow_board(number, one)
            if fair or self.random.random() < 0.5:
                one.ready += one.starting if one.step is None else []
                one.starting = one.starting if one.step is not None else []
            if one.step is not None and (fair or self.random.random() < 0.4):
                self._finish(number, one)

    def _follow_board(self, number: int, one: SimulatedRevision) -> None:
        if number not in self.listed:
            one.frontend, one.in_flight = "", 0
        elif number == self.takes or not one.took_requests:
            one.frontend = {"": "starting", "starting": "ready"}.get(one.frontend, "ready")
            if one.kind == "frontend":
                one.frontend, one.is_hopeless = "failed", True
        else:
            one.frontend = "draining"

    def _finish(self, number: int, one: SimulatedRevision) -> None:
        step, one.step = one.step, None
        match step:
            case Launch():
                one.launched = one.kind != "launch"
                one.is_hopeless = not one.launched
            case Start():
                if one.kind == "start":
                    one.starting, one.failures = [], one.failures + 1
                else:
                    one.ready += one.starting
                    one.starting, one.failures = [], 0
            case Park() if not one.in_flight:
                one.parked += [name for name in one.ready if name in step.watchers]
                one.ready = [name for name in one.ready if name not in step.watchers]
            case Wake():
                one.ready += one.parked
                one.parked = []
            case Retire():
                one.ready = [name for name in one.ready if name not in step.watchers]
                one.starting = [name for name in one.starting if name not in step.watchers]
                one.parked = [name for name in one.parked if name not in step.watchers]
            case End():
                self.revisions[number] = SimulatedRevision(one.kind, failures=one.failures, is_hopeless=one.is_hopeless)

    # What the controller does.

    @property
    def ordered(self) -> Ordered:
        entry = self.registry.entry(NAME)
        previous = None if entry.earlier is None else entry.earlier.revision
        return Ordered(
            entry.revision,
            previous,
            0 if self.idling.rest == "asleep" else self.workers,
            replace=self.replace,
            deleting=self.deleting,
            rest=self.idling.rest,
            waking=self.idling.waking_since is not None,
            wake_failed=self.idling.failure(self.now),
        )

    @property
    def free(self) -> int:
        return self.devices - sum(one.held for one in self.revisions.values())

    def seen(self) -> dict[int, Seen]:
        return {number: self._seen(one) for number, one in self.revisions.items()}

    def _seen(self, one: SimulatedRevision) -> Seen:
        under_way: dict[type, UnderWay] = {
            Launch: "launching",
            Start: "starting",
            Park: "parking",
            Wake: "waking",
            BreakOff: "retiring",
            Retire: "retiring",
            End: "ending",
        }
        ending = one.step.watchers if isinstance(one.step, Retire) else ()
        return Seen(
            launched=one.launched,
            under_way="" if one.step is None else under_way[type(one.step)],
            workers=Workers(
                tuple(name for name in one.ready if name not in ending),
                tuple(name for name in one.starting if name not in ending),
                ending,
                parked=tuple(name for name in one.parked if name not in ending),
            ),
            frontends=Frontends(
                int(one.frontend == "ready"),
                int(one.frontend == "starting"),
                int(one.frontend == "draining"),
                one.in_flight,
            ),
            room=self.free,
            failures=one.failures,
            is_hopeless=one.is_hopeless,
            error="it fails" if one.failures or one.is_hopeless else "",
            took_requests=one.took_requests,
            drain_is_over=self.drain_is_over and self.deleting,
        )

    def act(self) -> None:
        """One round of the controller."""
        if self.forgotten:
            return
        entry = self.registry.entry(NAME)
        for number, spec in [(entry.revision, entry.spec)] + (
            [] if entry.earlier is None else [(entry.earlier.revision, entry.earlier.spec)]
        ):
            self.revisions.setdefault(number, SimulatedRevision(spec.model))
        self._look_at_use()
        self._note_failed_wake()
        self.plan = next_steps(self.ordered, self.seen(), self.takes)
        self.takes, self.listed = self.plan.takes, self.plan.listed
        if self.takes is not None:
            self.revisions[self.takes].took_requests = True
        for step in self.plan.steps:
            self._carry_out(step)
        for number in [n for n, one in self.seen().items() if one.is_gone and n not in self._numbers()]:
            del self.revisions[number]

    def _look_at_use(self) -> None:
        current = self.revisions[self.registry.entry(NAME).revision if self.takes is None else self.takes]
        known = self.takes is not None and current.frontend == "ready" and self.registry.entry(NAME).earlier is None
        busy = any(one.in_flight for one in self.revisions.values()) if known else None
        seen = Activity(busy, 0, len(current.ready), bool(current.held or current.step))
        self.idling = idling.looked(self.idling, idling.times_of(self.spec), seen, self.now)

    def _note_failed_wake(self) -> None:
        current = self.revisions[self.registry.entry(NAME).revision]
        is_awake = self.spec.min_workers == 0 and self.idling.rest == "awake" and current.launched
        most = 1 if self.idling.waking_since is not None else GIVEN_UP_AFTER
        if is_awake and current.step is None and current.failures >= most and not current.ready + current.parked:
            self.idling = idling.wake_failed(self.idling, "it fails", self.now)

    def _numbers(self) -> tuple[int, ...]:
        return self.registry.entry(NAME).revisions

    def _carry_out(self, step: object) -> None:
        match step:
            case Launch() | Park() | Wake() | BreakOff() | Retire() | End():
                one = self.revisions[step.revision]
                if isinstance(step, End | BreakOff):
                    # Workers that were starting do not become ready any more.
                    one.starting = []
                one.step = step
            case Start():
                one = self.revisions[step.revision]
                assert step.workers <= self.free, "more workers are started than there are devices for"
                one.step = step
                self.starts += 1
                for _ in range(step.workers):
                    one.number_of_workers += 1
                    one.starting.append(f"w{one.number_of_workers}")
            case Settle():
                self.registry = registries.settle(self.registry, NAME, self.ordered.revision)
                self.replace = False
            case Revert():
                self.registry = registries.revert(self.registry, NAME, self.ordered.revision, 2.0)
                self.replace = False
                self._changed()
            case Forget():
                self.forgotten = True


def replace_spec(spec: EndpointSpec, kind: str, count: int) -> EndpointSpec:
    """The spec with another model, and so of another revision."""
    import msgspec

    return msgspec.structs.replace(spec, model=kind, args={"seed": count}, labels={"n": str(count)})
