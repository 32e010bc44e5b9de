"""Many requests at once for an endpoint that is asleep: how many starts, how many answers, and after how long."""

from __future__ import annotations

import asyncio

import msgspec

from benchmarks.endpoints.asleep import Sleepers, sleeper, sleeping
from benchmarks.harness.report import Figures, progress, table
from benchmarks.harness.spread import median
from dynamo_local.control.operations import SCALE_ENDPOINT

NAME = "chat"
_TOKENS = 8


class Crowd(msgspec.Struct, frozen=True):
    """A round of the crowd. `starts`: of workers. `first_s`, `last_s`: times of the first tokens, since the requests
    were sent."""

    requests: int
    answered: int
    starts: int
    first_s: float
    last_s: float
    errors: tuple[str, ...]


async def measure(rounds: int, requests: int) -> Figures:
    """Measure, print, and return the figures."""
    found = []
    async with sleeping([sleeper(NAME)]) as sleepers:
        for _ in range(rounds):
            found.append(await _round(sleepers, requests))
            progress(f"{found[-1].answered} of {requests} answered by {found[-1].starts} starts")
            await sleepers.order(SCALE_ENDPOINT, {"workers": 0}, name=NAME)
            await sleepers.until(NAME, "asleep")
    _show(found)
    return {"rounds": [msgspec.to_builtins(one) for one in found]}


async def _round(sleepers: Sleepers, requests: int) -> Crowd:
    sleepers.events()
    async with sleepers.client(NAME) as client:
        answers = await asyncio.gather(*(client.complete(f"{number} asks", _TOKENS) for number in range(requests)))
    whole = [one for one in answers if one.is_completed and one.tokens == _TOKENS]
    times = sorted(one.ttft_s for one in whole if one.ttft_s is not None)
    starts = sum(event.kind == "start" and event.what == "started" for event in sleepers.events())
    errors = {one.failure or f"{one.tokens} tokens" for one in answers if one not in whole}
    return Crowd(requests, len(whole), starts, times[0], times[-1], tuple(sorted(errors)))


def _show(found: list[Crowd]) -> None:
    rows = [
        ["requests", str(sum(one.requests for one in found))],
        ["answered", str(sum(one.answered for one in found))],
        ["starts", f"{sum(one.starts for one in found)} in {len(found)} rounds"],
        ["first token of the first, median, s", f"{median([one.first_s for one in found]):.2f}"],
        ["first token of the last, median, s", f"{median([one.last_s for one in found]):.2f}"],
    ]
    table("Many requests at once for an endpoint that is asleep", ["", ""], rows)
    for error in sorted({error for one in found for error in one.errors}):
        print(error)
