"""Steps in which nothing changes but that each running request draws a token: done at once."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_local.engine.mocker.outcome import StepOutcome
from dynamo_local.engine.mocker.scheduler import Scheduler
from dynamo_local.sim.requests import Counted


def alike(scheduler: Scheduler, outcome: StepOutcome, block_size: int) -> int:
    """Count the steps after this one, which has begun, that do the same: each request draws a token that is not its
    last one, in a block that it has and does not fill. Requests that wait cannot begin meanwhile."""
    if outcome.admitted or outcome.preempted or outcome.reads or len(outcome.emitted) < len(scheduler.running):
        return 0
    if outcome.prefill_tokens:
        return 0
    return max(
        min(
            (
                _alike(sequence.computed, len(sequence.blocks), sequence.end - sequence.length, block_size)
                for sequence in outcome.emitted
            ),
            default=0,
        ),
        0,
    )


def repeat(decoding: Sequence[Counted], steps: int) -> None:
    """Do that many steps more, of those that `alike` has told, once the first one is complete."""
    for sequence in decoding:
        sequence.computed += steps
        sequence.draw_all(steps)


def _alike(computed: int, blocks: int, left: int, block_size: int) -> int:
    in_block = min(blocks * block_size - computed, block_size - 1 - computed % block_size)
    return min(in_block, left - 2)
