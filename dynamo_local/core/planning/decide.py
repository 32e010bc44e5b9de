"""From the wishes of all roles to changes: what the budget and the minimums allow, in the way that costs least.

Each role changes by at most one worker. Where one role is short and another one has a worker to spare, that worker is
turned, which takes no device and no start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.planning.actions import AddWorker, Change, RemoveWorker, SwitchRole
from dynamo_local.core.planning.decision import Decision, Verdict
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.policies import concurrency, freeness, load
from dynamo_local.core.planning.proposals import Policy, Proposal
from dynamo_local.core.planning.window import History, RoleWindow, Window, WorkerWindow

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {"load": load.wish, "freeness": freeness.wish, "concurrency": concurrency.wish}
)

STARTING_INTERVALS = 3
"""While a worker of a role starts, the role is left alone; for so many intervals, since it may die again and again."""

FAILED_INTERVALS = 3
"""After a change that failed, the role is left alone for so long: what was wrong is likely to be wrong still, and every
worker that dies while it starts costs the others time and memory."""

_TURNABLE = frozenset({"decode", PREFILL_ROLE})
"""Roles between which a worker can be turned."""


def decide(window: Window, history: History, options: PlannerOptions, now: float) -> Decision:
    """What to change. Pure, and the same whatever the order of the workers."""
    max_devices = options.limits(window.inventory).max_devices
    assert max_devices is not None, "the options have a maximum"
    if window.roles is None:
        why = Verdict("all", 0, "hold: statefile or bus cannot be read")
        return Decision(now, options.policy, (why,), (), None, max_devices)
    devices = sum(_devices(role, options) for role in window.roles.values())
    policy = POLICIES[options.policy]
    claims = [
        _Claim(role, _restrained(role, policy(role, window, history, options), history, options))
        for role in window.roles.values()
    ]
    round_ = _Round(options, max_devices - devices)
    round_.settle(claims)
    verdicts = tuple(
        Verdict(claim.role.role, claim.wish.wanted, claim.wish.reason, claim.wish.figures) for claim in round_.told
    )
    return Decision(now, options.policy, verdicts, tuple(round_.changes), devices, max_devices)


@dataclass(frozen=True)
class _Claim:
    """What a role wants, after all that concerns it alone."""

    role: RoleWindow
    wish: Proposal

    def because(self, more: str) -> _Claim:
        return replace(self, wish=replace(self.wish, reason=f"{self.wish.reason}; {more}"))


@dataclass
class _Round:
    """Gives each claim what there is. `free` devices are left of the budget."""

    options: PlannerOptions
    free: int
    changes: list[Change] = field(default_factory=list)
    told: list[_Claim] = field(default_factory=list)

    def settle(self, claims: list[_Claim]) -> None:
        """Decode workers before prefill workers: a full KV cache stops the requests of both."""
        short = [claim for claim in claims if claim.wish.wanted > 0]
        spare = [claim for claim in claims if claim.wish.wanted < 0]
        self.told = [claim for claim in claims if claim.wish.wanted == 0]
        for claim in short:
            giver = next((other for other in spare if self._can_turn(claim, other)), None)
            if giver is not None:
                spare.remove(giver)
                self._turn(claim, giver)
            else:
                self._add(claim)
        for claim in spare:
            self.changes.append(RemoveWorker(_victim(claim), claim.role.role))
            self.told.append(claim)
        self.told.sort(key=lambda claim: claim.role.role)

    def _can_turn(self, short: _Claim, spare: _Claim) -> bool:
        return {short.role.role, spare.role.role} <= _TURNABLE and bool(spare.role.routable)

    def _turn(self, short: _Claim, giver: _Claim) -> None:
        watcher = _victim(giver)
        self.changes.append(SwitchRole(watcher, giver.role.role, short.role.role))
        self.told += [short.because(f"{watcher} is turned"), giver.because("one is turned")]

    def _add(self, claim: _Claim) -> None:
        role = claim.role
        cost = _engine_devices(role, self.options)
        if cost > self.free:
            self.told.append(claim.because(f"the budget has {max(self.free, 0)} devices left, {cost} needed"))
            return
        self.free -= cost
        self.changes.append(AddWorker(role.role, role.template))
        self.told.append(claim)


def _restrained(role: RoleWindow, wish: Proposal, history: History, options: PlannerOptions) -> Proposal:
    """The wish, as far as the role's own minimum, its workers that start and its last change allow."""
    staying, minimum = role.staying, options.min_gpu_budget
    held = sum(_held(worker.devices, role, options) for worker in staying)
    if held < minimum and wish.wanted <= 0:
        wish = replace(wish, wanted=1, reason=f"{held} devices, minimum {minimum} ({wish.reason})")
    if wish.wanted and role.starting and not _starts_for_long(role, history):
        names = ", ".join(worker.watcher for worker in role.starting)
        return replace(wish, wanted=0, reason=f"{wish.reason}, but {names} is starting")
    if wish.wanted and any(role.role in window.failed for window in history[-FAILED_INTERVALS:]):
        return replace(wish, wanted=0, reason=f"{wish.reason}, but the last change failed")
    if wish.wanted < 0:
        leaving = next((worker for worker in staying if worker.watcher == wish.victim), None) or _last(role)
        if leaving is None or held - _held(leaving.devices, role, options) < minimum:
            return replace(wish, wanted=0, reason=f"{wish.reason}, but the minimum is {minimum}")
        return replace(wish, victim=leaving.watcher)
    return wish


def _last(role: RoleWindow) -> WorkerWindow | None:
    return max(role.routable, key=lambda worker: worker.rank, default=None)


def _victim(claim: _Claim) -> str:
    assert claim.wish.victim is not None, "a wish for one less, once restrained, names it"
    return claim.wish.victim


def _starts_for_long(role: RoleWindow, history: History) -> bool:
    before = [window.role(role.role) for window in history[-STARTING_INTERVALS:]]
    return len(before) == STARTING_INTERVALS and all(then is not None and bool(then.starting) for then in before)


def _devices(role: RoleWindow, options: PlannerOptions) -> int:
    return sum(_held(worker.devices, role, options) for worker in role.workers)


def _held(devices: int, role: RoleWindow, options: PlannerOptions) -> int:
    """Workers that take no device (a mocker may) count as an engine does, or there would be no end to them."""
    return devices or options.devices_of_engine(role.role)


def _engine_devices(role: RoleWindow, options: PlannerOptions) -> int:
    """What one more worker takes; if the options say less than the workers there are, these are right."""
    return max([options.devices_of_engine(role.role), *(worker.devices for worker in role.workers)])
