"""What becomes of a request whose worker is lost: whether it can be continued, is to be tried alone, or fails. Pure."""

from __future__ import annotations

import enum
import math
import statistics
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from dynamo_local.core.messages.presence import Presence

# How a request's output depends on state that is lost with its worker. Pure. Which sampling parameter means what is
# decided by each engine.


class Fidelity(enum.IntEnum):
    """What becomes of the output when a request is continued from its log on another worker, best first."""

    EXACT = 0
    """The same tokens follow as without the loss."""
    DISTRIBUTION = 1
    """Tokens from the same distribution follow. The client did not ask for reproducible ones."""
    NONE = 2
    """The tokens that follow would depend on state that was lost with the worker. The request is not continued."""


@dataclass(frozen=True)
class Survival:
    """The fidelity of a request, and the sampling parameter that decides it (`because_of`). `rebuilt` names parameters
    whose state the next engine must rebuild from the log for that fidelity."""

    fidelity: Fidelity = Fidelity.EXACT
    because_of: str | None = None
    rebuilt: tuple[str, ...] = ()

    def without(self, forgotten: Collection[str]) -> Survival:
        """Return the survival among engines that cannot rebuild the state of these parameters."""
        lost = next((name for name in self.rebuilt if name in forgotten), None)
        if lost is None or self.fidelity is Fidelity.NONE:
            return self
        return Survival(Fidelity.NONE, lost, self.rebuilt)


LOST = Survival(Fidelity.NONE)


# Finds requests that end engines. Pure.
#
# An engine that dies leaves all requests that it worked on under suspicion, as any of them may be the cause. Each goes
# on elsewhere, from its log. Under most of them no second engine dies. A request under which a second one does is
# *suspect*: it is tried alone, on a worker that is set apart for it, and waits until there is one.
#
# - *If an engine dies while the request is tried*, the request is guilty, and fails.
# - *The request is cleared* when it has brought `CLEARING_TOKENS` in its trial, and goes on in company. A request that
#   ends engines ends the next one about where it ended the last: it goes on from its log, which lacks only the tokens
#   that were on their way. So a guilty request ends its trial at once, and an innocent one delays the others for few
#   tokens only. To stay alone to the end would be safer, and worse for all others: an engine has many requests, and
#   those that were twice beside a guilty one would be computed one after the other.
# - *Deaths are not forgotten.* They are counted for as long as the request lives, whatever tokens come between. A
#   cleared request is suspect again after one more, and this time stays alone until it ends.
#
# So a request that ends engines within CLEARING_TOKENS of having been placed ends three engines; one that takes longer
# ends four; no request ends more. And only a request that was alone with a dying engine fails: however often an
# innocent request is beside a guilty one, it finishes.
#
# Other causes of an engine's death (a device, a kill) are not known here: a request that meets this three times, the
# last time alone, is taken for guilty. Only the death of an engine counts, as its worker reports it. A worker that
# falls silent as a whole, because it was killed or the machine is busy, says nothing about its requests.

COMPANY_DEATHS = 2
"""Number of engines that die under a request in company until it is suspect."""

CLEARING_TOKENS = 16
"""Number of tokens that clear a suspect: more than are on their way when an engine dies."""


@dataclass(frozen=True)
class Standing:
    """The suspicion against one request."""

    deaths: int = 0
    """Number of engines that have died while they worked on the request."""
    suspect: bool = False
    cleared: bool = False
    """The request was suspect once, and passed its trial."""
    guilty: bool = False

    def after_death(self) -> Standing:
        """Return the standing after the death of an engine that worked on the request; on nothing else, if it is
        suspect."""
        deaths = self.deaths + 1
        return replace(self, deaths=deaths, guilty=self.suspect, suspect=deaths >= COMPANY_DEATHS)

    def after_tokens(self, tokens: int) -> Standing:
        """Return the standing after so many tokens of the current epoch."""
        if self.suspect and not self.cleared and not self.guilty and tokens >= CLEARING_TOKENS:
            return replace(self, suspect=False, cleared=True)
        return self

    @property
    def suspicion(self) -> str:
        """Why the request is suspect, in words."""
        return f"{self.deaths} engines died while they worked on it and on others"

    @property
    def guilt(self) -> str:
        """The error for the client of a guilty request."""
        return f"{self.deaths} engines died while they worked on this request, the last one on nothing else"


@dataclass(frozen=True)
class Begin:
    """Begin the trial: the worker is free, and takes no request but the suspect."""

    worker: str


@dataclass(frozen=True)
class Ask:
    """Ask the worker to be set apart for the suspect, or to stay so."""

    worker: str


def next_step(
    request_id: str, frontend: str, workers: Sequence[Presence], asked: str | None, avoid: Collection[str] = ()
) -> Begin | Ask | None:
    """Return the next step towards a trial of a suspect; None: wait.

    `workers` are the ready ones. `asked` is the worker that was asked last: no other is asked while it is there. A
    worker that is set apart for another frontend's request is not asked. (A trial of the same frontend has ended: a
    frontend tries one request at a time.)
    """
    own = [worker for worker in workers if _is_for(worker, request_id, frontend)]
    if own:
        exclusive = own[0].exclusive
        assert exclusive is not None, "only workers that are set apart were chosen"
        return Begin(own[0].lease) if exclusive.free else Ask(own[0].lease)
    free = [worker for worker in workers if worker.exclusive is None or worker.exclusive.frontend == frontend]
    if any(worker.lease == asked for worker in free):
        assert asked is not None, "no worker has the lease None"
        return Ask(asked)
    best = min(free, key=lambda worker: (worker.lease in avoid, _requests(worker), worker.watcher), default=None)
    return None if best is None else Ask(best.lease)


def _is_for(worker: Presence, request_id: str, frontend: str) -> bool:
    exclusive = worker.exclusive
    return exclusive is not None and (exclusive.request_id, exclusive.frontend) == (request_id, frontend)


def _requests(worker: Presence) -> float:
    """Return how many requests would have to leave the worker; infinite if its load is unknown."""
    load = worker.load
    if load is None or load.running is None or load.waiting is None:
        return math.inf
    return load.running + load.waiting


# What is known of a request's recovery.

_AVOIDED = 3
"""Number of workers that are remembered for having failed a request."""


@dataclass(frozen=True)
class RecoveryDeadlines:
    """How long a frontend waits for the events in a request's life, in seconds, and how often it tries."""

    placement_s: float = 10.0
    """Until a worker takes a request that no worker has had yet."""
    recovery_s: float = 120.0
    """Until a worker takes a request that lost its worker: a new one may have to load the model first."""
    request_s: float = 600.0
    """From a request's arrival to its last token."""
    silence_s: float = 1.5
    """If nothing is heard of a request for so long, its worker is asked. A prefill may well take longer."""
    ask_again_s: float = 0.5
    """Between two attempts to get a waiting request assigned, though this frontend has seen no change of the fleet: the
    router may have."""
    gap_s: float = 0.2
    """Between two requests for the same missing tokens."""
    fruitless_epochs: int = 8
    """Assignments in a row that brought no token before the request is given up."""


@dataclass
class Recovery:
    """What a frontend notes of one request so as to recover it: progress, questions and losses. Positions are output
    positions; times are CLOCK_MONOTONIC, in seconds."""

    heard_at: float = 0.0
    """When the worker last sent anything of the request, or was last asked or given it."""
    resend_asked_at: float = 0.0
    """When missing tokens were last asked for."""
    acknowledged: int = 0
    """The worker has been told to forget the tokens below this position."""
    epoch_start: int = 0
    """Position at which the current epoch began."""
    epoch_began_at: float | None = None
    """Time at which the current epoch began; None before the first."""
    fruitless: int = 0
    """Epochs in a row that brought no token."""
    avoid: tuple[str, ...] = ()
    """Leases of the workers that failed the request last."""
    standing: Standing = field(default_factory=Standing)
    """Whether the request is suspected of ending engines."""

    def begin_epoch(self, position: int, now: float) -> None:
        """Note that a worker is given the request from this position on."""
        self.epoch_start = position
        self.epoch_began_at = now
        self.heard_at = now

    def hear(self, now: float) -> None:
        """Note that the worker has sent something of the request, or is being asked for it."""
        self.heard_at = now

    def ask_resend(self, now: float, interval_s: float) -> bool:
        """Return whether missing tokens are to be asked for now: not if that was done within the interval. If so, note
        the time."""
        if now - self.resend_asked_at < interval_s:
            return False
        self.resend_asked_at = now
        return True

    def acknowledge(self, position: int) -> None:
        """Note that the worker was told to forget the tokens below this position."""
        self.acknowledged = position

    def accept(self, position: int) -> None:
        """Note that the log has grown up to this position."""
        self.standing = self.standing.after_tokens(position - self.epoch_start)

    def engine_died(self) -> None:
        """Note that an engine died while it worked on the request."""
        self.standing = self.standing.after_death()

    def lose(self, worker: str, position: int) -> None:
        """Note that `worker` failed the request or is lost, when the log had grown up to this position."""
        self.fruitless = 0 if position > self.epoch_start else self.fruitless + 1
        self.avoid = (*self.avoid, worker)[-_AVOIDED:]


def backoff_s(fruitless: int) -> float:
    """Return the pause before the next assignment, in seconds: none after the first loss, then 50 ms and half as much
    again each time, to 2 s."""
    return 0.0 if fruitless <= 1 else min(0.05 * 1.5 ** (fruitless - 2), 2.0)


def verdict_after_loss(position: int, survival: Survival, fruitless: int, deadlines: RecoveryDeadlines) -> str | None:
    """Return why the request cannot continue on another worker; None if it can.

    `position` is the number of tokens accepted, `fruitless` the number of epochs in a row without a new one.
    """
    if position > 0 and survival.fidelity is Fidelity.NONE:
        lost = "the worker that generated the answer was lost"
        return f"{lost}, and with it the state of {survival.because_of}" if survival.because_of else lost
    if fruitless >= deadlines.fruitless_epochs:
        return f"{fruitless} workers in a row failed the request"
    return None


# The rate at which the tokens of a request come. Pure.

_LOOKED_AT = 33
"""Number of times that are kept: the median is of up to 32 intervals."""


class Pace:
    """The pace of one request, by the times at which its last tokens were accepted (CLOCK_MONOTONIC, s)."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_LOOKED_AT)

    def note(self, now: float) -> None:
        """Note that tokens were accepted."""
        self._times.append(now)

    @property
    def last(self) -> float | None:
        """When tokens were last accepted; None if none were."""
        return self._times[-1] if self._times else None

    @property
    def step_s(self) -> float | None:
        """Median seconds from one acceptance to the next; None if there was at most one."""
        steps = [later - earlier for earlier, later in pairwise(self._times)]
        return statistics.median(steps) if steps else None
