"""What becomes of a request whose worker is lost, fails it, or falls silent: deadlines, records and verdicts. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from dynamo_local.core.request.fidelity import Fidelity, Survival
from dynamo_local.core.request.suspicion import Standing

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
