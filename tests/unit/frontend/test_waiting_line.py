"""Requests that wait for a worker go on by priority, keys in turn, then by arrival."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from components.frontend.placing import WaitingLine
from dynamo_local.core.ports import Request

REQUESTS = st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 3)), max_size=12)


def sampling(position: int, at_most: int | None = None) -> bytes:
    return b""


def request(number: int, priority: int, arrival: int, key: str = "") -> Request:
    return Request(f"r{number}", [1], sampling, float(arrival), priority, key)


@given(requests=REQUESTS)
def test_all_are_woken_in_order(requests: list[tuple[int, int]]) -> None:
    async def run() -> list[str]:
        line, woken = WaitingLine(), list[str]()

        async def wait(one: Request) -> None:
            with line.joined(one) as changed:
                await changed
                woken.append(one.request_id)

        waiting = [asyncio.create_task(wait(request(number, *each))) for number, each in enumerate(requests)]
        await asyncio.sleep(0)
        line.wake()
        await asyncio.gather(*waiting)
        return woken

    expected = sorted(range(len(requests)), key=lambda number: requests[number])
    assert asyncio.run(run()) == [f"r{number}" for number in expected]


async def test_a_key_does_not_wait_behind_all_of_another_one() -> None:
    line = WaitingLine()
    with ExitStack() as waiting:
        flood = [waiting.enter_context(line.joined(request(number, 0, 0, "flood"))) for number in range(9)]
        late = waiting.enter_context(line.joined(request(9, 0, 1, "late")))
        order = list[int]()

        def note(number: int, _: asyncio.Future[None]) -> None:
            order.append(number)

        for number, each in enumerate([*flood, late]):
            each.add_done_callback(partial(note, number))
        line.wake()
        await asyncio.sleep(0)
    assert order[:3] == [0, 9, 1]


async def test_a_change_before_the_wait_is_not_missed_and_who_left_is_not_woken() -> None:
    line = WaitingLine()
    with line.joined(request(0, 0, 0)) as left:
        pass
    with line.joined(request(1, 0, 0)) as changed:
        line.wake()
        async with asyncio.timeout(30):
            await changed
    assert not left.done()
