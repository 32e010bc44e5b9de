"""What frontends have under way together: limits hold for all of them, and what a dead one had is dropped."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.frontend.http.gate import HttpGate
from components.frontend.http.models import ModelEntry, ModelTable
from components.frontend.limits.places import Places
from components.frontend.limits.rooms import MOST_MODELS, Rooms
from dynamo_local.core.http.admission import AdmissionLimits
from dynamo_local.core.http.asgi import Receive, Scope, Send
from dynamo_local.core.priority.classes import PriorityClass, ahead_of
from tests.unit.frontend.asgi_driver import Answer, call, scope
from tests.unit.state.builders import in_child

HIGH, NORMAL, BACKGROUND = PriorityClass
LOWEST = BACKGROUND


class Counting(Rooms):
    """Rooms with a file of their own, which ends with them."""

    def __init__(self, path: Path) -> None:
        self.places = Places(path)
        super().__init__(self.places)

    def end(self) -> None:
        self.close()
        self.places.close()


Make = Callable[[], Counting]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Counting] = []

    def one() -> Counting:
        made.append(Counting(tmp_path / "run" / "limits"))
        return made[-1]

    yield one
    for rooms in made:
        rooms.end()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.sampled_from(["chat@1", "code@1"]), st.sampled_from(PriorityClass), st.integers(1, 3)
        ),
        max_size=30,
    )
)
def test_each_frontend_knows_what_all_others_have(
    make: Make, changes: list[tuple[int, str, PriorityClass, int]]
) -> None:
    frontends = [make() for _ in range(3)]
    for who, model, one, sequences in changes:
        frontends[who].of(model).add(one, sequences)
    for me, rooms in enumerate(frontends):
        for model in ("chat@1", "code@1"):
            for one in PriorityClass:
                ahead = [
                    number for who, of, other, number in changes if who != me and of == model and other in ahead_of(one)
                ]
                assert rooms.of(model).others_ahead(one) == sum(ahead)
    for who, model, one, sequences in changes:
        frontends[who].of(model).add(one, -sequences)
    assert {rooms.of(model).others_ahead(LOWEST) for rooms in frontends for model in ("chat@1", "code@1")} == {0}
    for rooms in frontends:
        # There are not as many places as examples.
        rooms.end()
        rooms.end = lambda: None  # type: ignore[method-assign]


def test_what_is_held_counts_apart(make: Make) -> None:
    one, other = make().of("m"), make().of("m")
    one.add_held(NORMAL, 2)
    assert (other.others_held(NORMAL), other.others_held(HIGH), other.others_ahead(LOWEST)) == (2, 0, 0)


def test_more_models_than_rows_have_their_rows_one_after_the_other(make: Make) -> None:
    one, other = make(), make()
    for number in range(MOST_MODELS):
        one.of(f"m{number}").add(NORMAL, 1)
    one.of("late").add(NORMAL, 5)
    assert other.of("late").others_ahead(LOWEST) == 0
    one.of("late").add(NORMAL, -5)
    one.of("m7").add(NORMAL, -1)
    one.of("late").add(NORMAL, 5)
    assert other.of("late").others_ahead(LOWEST) == 5
    assert other.of("m7").others_ahead(LOWEST) == 0
    assert other.of("m8").others_ahead(LOWEST) == 1


def test_what_a_killed_frontend_had_is_dropped(make: Make, tmp_path: Path) -> None:
    survivor = make()
    survivor.note_under_way(2)

    def die() -> None:
        rooms = Rooms(Places(tmp_path / "run" / "limits"))
        rooms.of("m").add(NORMAL, 3)
        rooms.note_under_way(3)
        rooms.note_connections(4)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(die) == -signal.SIGKILL
    assert (survivor.of("m").others_ahead(LOWEST), survivor.under_way, survivor.other_connections) == (0, 2, 0)


def test_the_next_frontend_at_a_place_has_nothing(make: Make, tmp_path: Path) -> None:
    def die() -> None:
        rooms = Rooms(Places(tmp_path / "run" / "limits"))
        rooms.of("m").add(NORMAL, 3)
        rooms.note_under_way(3)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(die) == -signal.SIGKILL
    assert make().under_way == 0
    assert make().of("m").others_ahead(LOWEST) == 0


def test_one_that_lacks_room_for_a_connection_tells_the_others_once(make: Make) -> None:
    one, other = make(), make()
    assert not other.crowded_elsewhere()
    one.note_crowded()
    assert not one.crowded_elsewhere()
    assert (other.crowded_elsewhere(), other.crowded_elsewhere()) == (True, False)


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0)


class Frontend:
    """A gate before one model, whose requests end when they are told to."""

    def __init__(self, rooms: Rooms, limits: AdmissionLimits) -> None:
        self.end = asyncio.Event()
        self.why: str | None = None
        self.entry = ModelEntry(["m"], lambda: self.why, limits, self._app, room=rooms.of("m"))
        self.gate = HttpGate(
            self._app, limits=limits, models=ModelTable([self.entry]), is_draining=lambda: False, rooms=rooms
        )

    async def ask(self) -> Answer:
        return await call(self.gate, scope("/v1/completions"), [b'{"model": "m", "prompt": "x"}'])

    async def load(self) -> bytes:
        return (await call(self.gate, scope("/load", "GET"))).body

    async def _app(self, asked: Scope, receive: Receive, send: Send) -> None:
        await self.end.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


async def test_max_requests_holds_for_all_together(make: Make) -> None:
    frontends = [Frontend(make(), AdmissionLimits(max_requests=3)) for _ in range(2)]
    one, other = frontends
    under_way = [asyncio.create_task(each.ask()) for each in (one, other, one)]
    await asyncio.sleep(0)
    await eventually(lambda: one.entry.requests + other.entry.requests == 3)
    assert await one.load() == b'{"server_load":3}'
    assert await other.load() == b'{"server_load":3}'
    refused = await other.ask()
    assert refused.status == 429
    assert "3 of at most 3 sequences (setting max-requests)" in refused.error["message"]
    one.end.set()
    await asyncio.gather(under_way[0], under_way[2])
    more = asyncio.create_task(other.ask())
    other.end.set()
    assert [(await each).status for each in (under_way[1], more)] == [200, 200]
    assert await one.load() == b'{"server_load":0}'


async def test_max_held_holds_for_all_together(make: Make) -> None:
    frontends = [Frontend(make(), AdmissionLimits(max_held=1)) for _ in range(2)]
    one, other = frontends
    for each in frontends:
        each.why, each.entry.app = "no worker is ready", None
    held = asyncio.create_task(one.ask())
    await eventually(lambda: len(one.entry.line) == 1)
    refused = await other.ask()
    assert refused.status == 503
    assert "max-held" in refused.error["message"]
    one.why, one.entry.app = None, one._app
    one.end.set()
    one.entry.look()
    assert (await held).status == 200
