"""What becomes of a request whose worker is lost, fails it, or has gone quiet. Pure: deadlines and verdicts."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_local.core.request.fidelity import Fidelity, Survival


@dataclass(frozen=True)
class RecoveryDeadlines:
    """How long a frontend waits for what, in seconds, and how often it tries."""

    placement_s: float = 10.0
    """For a worker to take a request that no worker has had yet."""
    recovery_s: float = 120.0
    """For a worker to take a request that lost its worker: a new one may have to load the model first."""
    request_s: float = 600.0
    """For a whole request, from its arrival to its last token."""
    silence_s: float = 1.5
    """Without news of a request, its worker is asked where it stands. A prefill may well take longer."""
    ask_again_s: float = 0.5
    """Between two attempts to get a waiting request assigned, though nothing changed here: the router may have heard
    of more."""
    gap_s: float = 0.2
    """Between two questions for the same missing tokens."""
    fruitless_epochs: int = 8
    """Assignments in a row that brought no token before the request is given up."""


def backoff_s(fruitless: int) -> float:
    """Pause before the next assignment: none after the first loss, then from 50 ms by half more each time, to 2 s."""
    return 0.0 if fruitless <= 1 else min(0.05 * 1.5 ** (fruitless - 2), 2.0)


def verdict_after_loss(position: int, survival: Survival, fruitless: int, patience: RecoveryDeadlines) -> str | None:
    """Why the request cannot go on elsewhere; None if it can.

    `position` is the number of tokens accepted, `fruitless` the number of epochs in a row without a new one.
    """
    if position > 0 and survival.fidelity is Fidelity.NONE:
        lost = "the worker that generated the answer was lost"
        return f"{lost}, and with it the state of {survival.because_of}" if survival.because_of else lost
    if fruitless >= patience.fruitless_epochs:
        return f"{fruitless} workers in a row failed the request"
    return None
