"""Decides on the workers of all endpoints, within one budget of devices. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from dynamo_local.core.endpoints.checks import devices_of_worker
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.messages.endpoints import EndpointState
from dynamo_local.core.planning.decision import Count, Decision, Verdict
from dynamo_local.core.planning.memory import Memory, bounds_of, wants_of
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.steps import held_after, step
from dynamo_local.core.planning.window import EndpointSeen, Observation, WorkerSeen
from dynamo_local.core.shares import summed

LEFT_ALONE: frozenset[EndpointState] = frozenset({"updating", "failed", "deleting"})
"""States of endpoints in which the server itself changes the workers, or there is no use in more."""

RESTING: frozenset[EndpointState] = frozenset({"parked", "asleep"})
"""States of endpoints whose number of workers nobody asks the planner for. They take the devices that they hold."""

WAKING: EndpointState = "waking"
"""Whether there is a worker is the server's to decide, as many as are needed may start beside it."""

Memories = Mapping[str, Memory]
"""What is remembered of each endpoint, by its name."""


@dataclass(frozen=True)
class Planned:
    """The decisions at a pull: about the endpoint that is changed by actions if an interval ends for it, then about
    those whose number of workers may change, the oldest first. `memories`: what is remembered for the next pull."""

    decisions: tuple[Decision, ...]
    memories: Memories


def decide(observation: Observation, memories: Memories, options: PlannerOptions) -> Planned:
    """Decide at a pull. Pure; the order of endpoints and workers does not matter."""
    max_devices = options.max_devices(observation.inventory)
    considered = [
        _consider(seen, memories.get(seen.name, Memory()), observation, options)
        for seen in observation.others
        if seen.roles
    ]
    pools = [pool for each in considered for pool in each.pools]
    remembered = {each.seen.name: each.memory for each in considered}
    own: float = 0
    decisions: list[Decision] = []
    if (main := observation.main) is not None:
        taken = _taken_by_others(observation, main, pools)
        memory = memories.get(main.name, Memory())
        stepped, remembered[main.name] = _stepped(main, memory, options, max_devices, taken)
        decisions += stepped
        own = max(main.fleet.devices or 0, remembered[main.name].under_way or 0)
    budget = _Budget(max_devices, own, _devices(observation, own), pools)
    decisions += [
        Decision(
            observation.at,
            each.seen.spec.policy,
            budget.verdicts(each),
            (),
            budget.devices,
            max_devices,
            not options.no_operation,
            each.seen.name,
        )
        for each in considered
    ]
    return Planned(tuple(decision for decision in decisions if decision.verdicts), remembered)


def _stepped(
    main: EndpointSeen, memory: Memory, options: PlannerOptions, max_devices: int, taken: float
) -> tuple[list[Decision], Memory]:
    """Return the decision about the endpoint that is changed by actions, if an interval ends with this pull."""
    if memory.under_way is not None:
        return [], memory
    history = memory.history
    memory, window = memory.pulled(main.fleet, options)
    if window is None:
        return [], memory
    decision = step(window, history, options, max_devices, taken)
    if decision.acts and decision.actions:
        memory = replace(memory, under_way=held_after(window, decision.actions, options))
    return [decision], memory


def _taken_by_others(observation: Observation, main: EndpointSeen, pools: Sequence[Pool]) -> float:
    """Return the devices that the other endpoints hold, or are to have by what was ordered of the server last."""
    held = summed([observation.held or 0, -(main.fleet.devices or 0)])
    return max(held, float(sum(pool.takes(pool.ordered) for pool in pools)))


def _devices(observation: Observation, own: float) -> float | None:
    if any(seen.fleet.workers is None for seen in observation.endpoints):
        return None
    return own + sum(seen.fleet.devices or 0 for seen in observation.others)


@dataclass(frozen=True)
class _Considered:
    """An endpoint with what it wants, and its pools."""

    seen: EndpointSeen
    wants: Mapping[str, Verdict]
    pools: tuple[Pool, ...]
    memory: Memory


def _consider(seen: EndpointSeen, memory: Memory, observation: Observation, options: PlannerOptions) -> _Considered:
    ordered = {role: _ordered(seen, role, memory, observation.board) for role in seen.roles}
    wants, memory = wants_of(seen, memory, ordered, options)
    if seen.status.state == WAKING:
        wants = {role: _never_fewer(want, ordered[role]) for role, want in wants.items()}
    left_alone = seen.status.state in LEFT_ALONE or rests(seen)
    if left_alone:
        memory = memory.without_proposals()
    if memory.refused_until is not None and observation.at >= memory.refused_until:
        memory = replace(memory, refused_until=None)
    fixed = left_alone or memory.refused_until is not None
    pools = tuple(_pool(seen, role, wants[role], ordered[role], fixed) for role in ordered)
    return _Considered(seen, wants, pools, memory)


def _never_fewer(want: Verdict, ordered: int) -> Verdict:
    if want.wanted >= ordered:
        return want
    return replace(want, wanted=ordered, reason=f"{want.reason}; it is being woken")


def rests(seen: EndpointSeen) -> bool:
    """Whether the endpoint is at rest, which the server alone decides."""
    waits = seen.status.state == "waiting" and seen.spec.min_workers == 0
    return waits or seen.status.state in RESTING


def _ordered(seen: EndpointSeen, role: str, memory: Memory, board: int) -> int:
    """Return the number of workers that the server keeps or starts in a role."""
    if seen.status.state in ("failed", "deleting"):
        return 0
    if rests(seen):
        return _held(seen, role)
    if seen.status.state == WAKING:
        # A start that is ordered takes its devices at once.
        return max(_held(seen, role), memory.ordered(seen, role, board), bounds_of(seen.spec, role)[0])
    # One that still waits for devices may show 0, and gets its minimum without an order.
    return max(memory.ordered(seen, role, board), bounds_of(seen.spec, role)[0])


def _held(seen: EndpointSeen, role: str) -> int:
    return sum(worker.standing != "retiring" for worker in seen.fleet.of_role(role))


def _pool(seen: EndpointSeen, role: str, want: Verdict, ordered: int, fixed: bool) -> Pool:
    lowest, highest = bounds_of(seen.spec, role)
    workers = seen.fleet.of_role(role)
    leaving = sum(worker.standing == "retiring" for worker in workers)
    return Pool(
        seen.name,
        role,
        seen.view.created_at,
        devices_of(seen.spec, workers),
        lowest,
        want.wanted,
        ordered,
        len(workers) - leaving,
        leaving,
        fixed=fixed or lowest >= highest,
    )


class _Budget:
    """The budget of devices at one pull. `own`: devices of the endpoint that is changed by actions. `devices`: those
    that all workers hold together; None if they are unknown, then nothing is shared out."""

    def __init__(self, max_devices: int, own: float, devices: float | None, pools: Collection[Pool]) -> None:
        self.devices = devices
        self._max_devices = max_devices
        self._own = own
        self._shares = () if devices is None else share(pools, max_devices, own)

    def verdicts(self, each: _Considered) -> tuple[Verdict, ...]:
        """Return the verdicts about an endpoint; none if its number of workers is fixed."""
        if rests(each.seen):
            status = each.seen.status
            why = f"left alone: it is {status.state}" + (f", {status.reason}" if status.reason else "")
            return tuple(_left_alone(each, pool, why, each.seen.ready(pool.role)) for pool in each.pools)
        return tuple(self._verdict(each, pool) for pool in each.pools if not pool.fixed)

    def _verdict(self, each: _Considered, pool: Pool) -> Verdict:
        mine = next((one for one in self._shares if one.pool == pool), None)
        if mine is None:
            return _left_alone(each, pool, "hold: statefile or bus cannot be read", None)
        want, count = each.wants[pool.role], Count(pool.ordered, mine.gets, mine.order, each.seen.ready(pool.role))
        return replace(want, reason=self._reason(want, mine), count=count)

    def _reason(self, want: Verdict, mine: Share) -> str:
        """Return why the pool gets what it gets, in a line with numbers."""
        parts = [f"wants {want.wanted}: {want.reason}"]
        if mine.gets < want.wanted:
            others = [f"{_number(self._own)} {_are(self._own)} the graph's own"] if self._own else []
            others += [_of_other(one) for one in self._shares if one is not mine and (one.gets or one.pool.fixed)]
            most = self._max_devices
            of = f"of {most} devices {', '.join(others)}" if others else f"there are {most} devices"
            parts.append(f"gets {mine.gets}: {of}")
        if mine.order < mine.gets:
            parts.append(f"{mine.order} now, {mine.gets - mine.order} more when devices are given back")
        return "; ".join(parts)


def _left_alone(each: _Considered, pool: Pool, why: str, ready: int | None) -> Verdict:
    number = pool.ordered
    count = Count(number, number, number, ready)
    return replace(each.wants[pool.role], wanted=number, reason=why, count=count)


def _of_other(other: Share) -> str:
    pool = other.pool
    name = f"{pool.endpoint}'s {pool.role} workers'" if pool.role == PREFILL_ROLE else f"{pool.endpoint}'s"
    devices = pool.takes(other.gets) if pool.fixed else pool.devices * other.gets
    minimum = " minimum" if not pool.fixed and other.gets <= pool.minimum else ""
    return f"{_number(devices)} {_are(devices)} {name}{minimum}"


def _are(devices: Fraction | float) -> str:
    return "is" if devices == 1 else "are"


def _number(devices: Fraction | float) -> str:
    return f"{float(devices):g}"


# Shares one budget of devices among the workers of all endpoints.
# The rules, in this order:
# 1. What is not the planner's to change is taken: the graph's own workers, and pools that are `fixed`. 2. Minimums,
# those of the oldest endpoint first. 3. One worker at a time for the pool that lacks the largest share of what it
# wants; of equals, for the older endpoint. A pool whose next worker does not fit is passed over.
#
# So the shares follow from what is wanted now and not from who came first. An endpoint with more than its share gives
# back at once, and others get those devices once they are free: workers that are ending still hold theirs.

_FINEST = 1000
"""Shares of a device are counted exactly, in fractions with at most this denominator: sums of floats would not be."""


@dataclass(frozen=True)
class Pool:
    """An endpoint's workers of one role, as the budget sees them.

    `devices`: those of each worker, or its share of one. `ordered`: number of workers that the server was told to run.
    `staying` and `leaving`: workers that hold devices now. `fixed`: its number is not the planner's to change.
    """

    endpoint: str
    role: str
    created_at: float
    devices: Fraction
    minimum: int
    wanted: int
    ordered: int
    staying: int
    leaving: int = 0
    fixed: bool = False

    @property
    def age(self) -> tuple[float, str, str]:
        """Sort key: the oldest endpoint first."""
        return self.created_at, self.endpoint, self.role

    def unmet(self, workers: int) -> Fraction:
        """Share of the wanted workers that `workers` do not make up, 0 to 1."""
        return Fraction(max(self.wanted - workers, 0), max(self.wanted, 1))

    def takes(self, workers: int) -> Fraction:
        """Devices that the pool takes when brought to `workers`, while those that leave, or are still to leave, hold
        theirs."""
        return self.devices * (self.leaving + max(self.staying, workers))


def devices_of(spec: EndpointSpec, workers: Sequence[WorkerSeen]) -> Fraction:
    """Devices of each worker of an endpoint: as many as those that run hold, otherwise as the spec says. Workers
    without devices (mockers, say) count as well: otherwise the budget would not limit their number."""
    held = max((worker.devices for worker in workers), default=0)
    return exact(held or devices_of_worker(spec) or 1)


def exact(devices: float) -> Fraction:
    """A number of devices as a fraction."""
    return Fraction(devices).limit_denominator(_FINEST)


@dataclass(frozen=True)
class Share:
    """What a pool gets. `gets`: its share, in workers. `order`: number of workers to order now, at most the share if
    it is an increase."""

    pool: Pool
    gets: int
    order: int


def share(pools: Collection[Pool], devices: int, taken: float) -> tuple[Share, ...]:
    """Return the share of each pool, the oldest endpoint first. The order of `pools` does not matter.

    `devices`: the budget. `taken`: those of them that the graph's own workers have.
    """
    ordered = sorted(pools, key=lambda pool: pool.age)
    mine = [pool for pool in ordered if not pool.fixed]
    left = devices - exact(taken) - sum((pool.takes(pool.ordered) for pool in ordered if pool.fixed), Fraction(0))
    shares = _divided(mine, left)
    orders = _orders(mine, shares, left)
    return tuple(
        Share(pool, pool.ordered, pool.ordered) if pool.fixed else Share(pool, shares[pool], orders[pool])
        for pool in ordered
    )


@dataclass
class _Counting:
    """Workers of each pool so far, of `left` devices. Pools are in the order of their age.

    `held`: workers whose devices the pool has anyway, and which therefore take none.
    """

    left: Fraction
    workers: dict[Pool, int]
    upto: dict[Pool, int]
    held: dict[Pool, int] = field(default_factory=dict)

    def fill(self) -> None:
        """Add workers by the rules 2 and 3."""
        for pool in self.workers:
            while self.workers[pool] < min(pool.minimum, self.upto[pool]) and self._fits(pool):
                self._add(pool)
        while short := [p for p, number in self.workers.items() if number < self.upto[p] and self._fits(p)]:
            # The first of equals, which is the oldest.
            self._add(max(short, key=lambda pool: pool.unmet(self.workers[pool])))

    def _fits(self, pool: Pool) -> bool:
        return self._cost(pool) <= max(self.left, Fraction(0))

    def _add(self, pool: Pool) -> None:
        self.left -= self._cost(pool)
        self.workers[pool] += 1

    def _cost(self, pool: Pool) -> Fraction:
        return Fraction(0) if self.workers[pool] < self.held.get(pool, 0) else pool.devices


def _divided(pools: Sequence[Pool], left: Fraction) -> dict[Pool, int]:
    """Return the share of each pool, as if no worker ran."""
    counting = _Counting(left, dict.fromkeys(pools, 0), {pool: pool.wanted for pool in pools})
    counting.fill()
    return counting.workers


def _orders(pools: Sequence[Pool], shares: dict[Pool, int], left: Fraction) -> dict[Pool, int]:
    """Return the number to order for each pool: less at once, more as far as devices are free now."""
    # Never below the minimum, which the server would refuse: where it does not fit, the endpoint waits for devices.
    base = {pool: min(pool.ordered, max(shares[pool], pool.minimum)) for pool in pools}
    free = left - sum((pool.takes(base[pool]) for pool in pools), Fraction(0))
    counting = _Counting(free, base, shares, {pool: pool.staying for pool in pools})
    counting.fill()
    return counting.workers
