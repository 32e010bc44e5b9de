"""Requests for small simulated fleets."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.sim.requests import Arrival

BLOCK = 4
SMALL = MockerSettings(
    mocker_kv_blocks=24,
    mocker_block_size=BLOCK,
    mocker_max_num_seqs=4,
    mocker_max_num_batched_tokens=16,
    mocker_max_model_len=80,
)


@st.composite
def workloads(draw: st.DrawFn) -> list[Arrival]:
    """Requests of a few families whose contexts begin alike, some of them with one that follows."""
    made = []
    for number in range(draw(st.integers(1, 25))):
        prompt, output = draw(st.integers(1, 50)), draw(st.integers(1, 25))
        family, shared = draw(st.integers(0, 3)), draw(st.integers(0, 8))
        blocks = min(shared, (prompt + output) // BLOCK)
        keys = tuple(family * 1_000 + index for index in range(blocks))
        arrival = Arrival(number, draw(st.floats(0, 2)), prompt, output, keys)
        if draw(st.booleans()):
            then = Arrival(1_000 + number, draw(st.floats(0, 1)), prompt, output, keys)
            arrival = replace(arrival, then=then)
        made.append(arrival)
    return made
