"""Observations for tests of the planner, and a simulated fleet under a constant load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from dynamo_local.core.fleet.rates import Reading
from dynamo_local.core.messages.work import QueueLength
from dynamo_local.core.planning.actions import Action, AddWorker, RemoveWorker, SwitchRole
from dynamo_local.core.planning.decision import Decision
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.steps import step
from dynamo_local.core.planning.window import (
    Fleet,
    History,
    Standing,
    Window,
    WorkerSeen,
    aggregate,
    remember,
)

AGGREGATED = {"aggregated": "VllmWorker"}
DISAGGREGATED = {"decode": "VllmWorker", "prefill": "PrefillWorker"}
KV_TOKENS = 32_768
RUNNING_AT_ONCE = 8
"""Requests of a decode worker whose batch is full."""
HEAD_TOKENS = KV_TOKENS // RUNNING_AT_ONCE
"""Default size of a waiting request, in tokens."""
JOBS_IN_HAND = 4
"""Jobs in the hands of a busy prefill worker."""


def worker(
    name: str = "VllmWorker",
    role: str = "decode",
    kv: float | None = 0.7,
    *,
    running: int = 8,
    waiting: int = 0,
    head_tokens: int = HEAD_TOKENS,
    standing: Standing = "routable",
    devices: float = 1,
) -> WorkerSeen:
    """Return a decode worker. `kv` None: its load is unknown."""
    reading = None if kv is None else Reading(running, waiting, kv, 0.1, head_tokens if waiting else 0)
    return WorkerSeen(f"ns_{name}", role, standing, devices, reading, KV_TOKENS)


def prefiller(name: str = "PrefillWorker", *, busy: bool = False, kv: float | None = 0.0) -> WorkerSeen:
    return worker(name, "prefill", kv, running=int(busy))


def pull(
    *workers: WorkerSeen,
    at: float = 0.0,
    queue: QueueLength | int | None = 0,
    templates: dict[str, str] | None = None,
) -> Fleet:
    reading = QueueLength(queue, 0) if isinstance(queue, int) else queue
    return Fleet(at, tuple(workers), reading, templates or DISAGGREGATED)


def quiet_history(window: Window, intervals: int = 4) -> History:
    """Return a history in which every interval was like the window."""
    return (window,) * intervals


def decision_of(
    pulls: Fleet | Sequence[Fleet],
    options: PlannerOptions | None = None,
    history: History | None = None,
    *,
    inventory: int | None = None,
    taken: float = 0,
) -> Decision:
    """Decide on these pulls. Without `history`, all earlier intervals were alike. `taken`: devices of other
    endpoints."""
    window = aggregate([pulls] if isinstance(pulls, Fleet) else pulls)
    known = quiet_history(window) if history is None else history
    options = options or PlannerOptions()
    most = options.max_gpu_budget if inventory is None else min(options.max_gpu_budget, inventory)
    return step(window, known, options, most, taken)


def reason_of(decision: Decision, role: str) -> str:
    return next(verdict.reason for verdict in decision.verdicts if verdict.role == role)


@dataclass
class LivingFleet:
    """A simulated fleet under a constant load. `decode_work` and `prefill_work` are in workers: 1.5 keeps one and a
    half workers busy all the time. Excess work waits at decode workers, or as jobs in the prefill queue, which grows by
    `jobs_per_interval` for each missing worker and shrinks likewise."""

    options: PlannerOptions
    decode_work: float
    prefill_work: float
    roles: dict[str, str] = field(default_factory=lambda: {"VllmWorker": "decode", "PrefillWorker": "prefill"})
    jobs_per_interval: float = 10.0
    queue: float = 0.0
    now: float = 0.0
    history: History = ()
    decisions: list[Decision] = field(default_factory=list)

    def interval(self) -> Decision:
        """Simulate an adjustment interval, and apply the actions at its end at once."""
        pulls = [self._pull() for _ in range(5)]
        window = aggregate(pulls)
        decision = step(window, self.history, self.options, self.options.max_gpu_budget)
        self.history = remember(self.history, window, self.options)
        self.decisions.append(decision)
        for action in decision.actions:
            self._apply(action)
        return decision

    def count(self, role: str) -> int:
        return sum(1 for other in self.roles.values() if other == role)

    @property
    def total(self) -> int:
        return len(self.roles)

    def _pull(self) -> Fleet:
        self.now += self.options.adjustment_interval / 5
        decoding, prefilling = max(self.count("decode"), 1), max(self.count("prefill"), 1)
        self.queue = max(0.0, self.queue + self.jobs_per_interval / 5 * (self.prefill_work - prefilling))
        usage, busy = min(self.decode_work / decoding, 1.0), min(self.prefill_work / prefilling, 1.0)
        theirs = _spread(round(self.decode_work * RUNNING_AT_ONCE), decoding)
        step = round(self.now / self.options.adjustment_interval * 5) % 5
        seen = []
        for name, role in self.roles.items():
            if role == "decode":
                requests = theirs.pop()
                running = min(requests, RUNNING_AT_ONCE)
                seen.append(worker(name, role, usage, running=running, waiting=requests - running))
            else:
                # A partly busy worker has work at that share of the five pulls.
                seen.append(prefiller(name, busy=self.queue > 0 or step < busy * 5 - 0.5))
        in_hand = math.ceil(JOBS_IN_HAND * min(self.prefill_work, prefilling))
        return pull(*seen, at=self.now, queue=QueueLength(int(self.queue), in_hand))

    def _apply(self, action: Action) -> None:
        match action:
            case AddWorker(component=component, role=role):
                index = next(i for i in range(1, 100) if f"{component}_{i}" not in self.roles)
                self.roles[f"{component}_{index}"] = role
            case RemoveWorker(watcher=watcher):
                del self.roles[watcher.removeprefix("ns_")]
            case SwitchRole(watcher=watcher, to=to):
                self.roles[watcher.removeprefix("ns_")] = to


def _spread(requests: int, workers: int) -> list[int]:
    return [requests // workers + (index < requests % workers) for index in range(workers)]
