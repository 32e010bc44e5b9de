"""Steps in which nothing changes but that each running request draws a token: done at once."""

from __future__ import annotations

import math
from collections.abc import Iterable

from dynamo_local.engine.mocker.outcome import StepOutcome
from dynamo_local.engine.mocker.scheduler import Scheduler
from dynamo_local.engine.mocker.sequence import Sequence
from dynamo_local.sim.requests import Counted


def alike(scheduler: Scheduler, outcome: StepOutcome, block_size: int) -> int:
    """Count the steps after this one, which has begun, that do the same: each request draws a token that is neither its
    first nor its last one, in a block that it has and does not fill. Requests that wait cannot begin meanwhile. None if
    blocks have left the cache for this step: that is told when it ends."""
    if not scheduler.pool.log.is_empty:
        return 0
    if outcome.admitted or outcome.preempted or outcome.reads or len(outcome.emitted) < len(scheduler.running):
        return 0
    steps = math.inf
    for sequence in outcome.emitted:
        if outcome.computed[sequence] > 1 or not sequence.drawn:
            return 0
        steps = min(steps, _alike(sequence, block_size))
    return max(int(steps), 0) if outcome.emitted else 0


def repeat(decoding: Iterable[Counted], steps: int) -> None:
    """Do that many steps more, of those that `alike` has told, once the first one is complete."""
    for sequence in decoding:
        sequence.computed += steps
        sequence.draw_all(steps)


def _alike(sequence: Sequence, block_size: int) -> int:
    computed = sequence.computed
    in_block = min(len(sequence.blocks) * block_size - computed, block_size - 1 - computed % block_size)
    return min(in_block, sequence.end - sequence.length - 2)
