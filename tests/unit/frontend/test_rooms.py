"""What frontends have under way together: limits hold for all of them, and what a dead one had is dropped."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.frontend.http.callers import Caller
from components.frontend.http.gate import HttpGate
from components.frontend.http.models import ModelEntry, ModelTable
from components.frontend.limits.places import HEAD, Places
from components.frontend.limits.rooms import END, MOST_MODELS, Rooms
from components.frontend.request_context import RequestContext, note_request
from dynamo_local.core.http.asgi import Receive, Scope, Send
from dynamo_local.core.http.bounds.admission import AdmissionLimits
from dynamo_local.core.http.bounds.limits import LIMITED
from dynamo_local.core.priority.classes import PriorityClass, ahead_of, class_of, mark_of
from tests.unit.frontend.asgi_driver import Answer, call, scope
from tests.unit.state.builders import in_child

HIGH, NORMAL, LOWEST = PriorityClass


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


@pytest.fixture
def pair(make: Make) -> tuple[Counting, Counting]:
    return make(), make()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(["chat@1", "code@1"]),
            st.sampled_from([-1, 0, 1]),
            st.sampled_from(["", "a", "b"]),
            st.integers(1, 3),
        ),
        max_size=30,
    )
)
def test_each_frontend_knows_what_all_others_have_and_whose_it_is(
    make: Make, changes: list[tuple[int, str, int, str, int]]
) -> None:
    frontends = [make() for _ in range(3)]
    for who, model, priority, key, sequences in changes:
        frontends[who].of(model).sequences.add(priority, key, sequences)
    for me, rooms in enumerate(frontends):
        for model in ("chat@1", "code@1"):
            for one in PriorityClass:
                ahead = Counter[bytes]()
                for who, of, priority, key, number in changes:
                    if who != me and of == model and class_of(priority) in ahead_of(one):
                        ahead[mark_of(key)] += number
                assert rooms.of(model).sequences.by_key(one) == ahead
                assert rooms.of(model).sequences.ahead(one) == ahead.total()
    for who, model, priority, key, sequences in changes:
        frontends[who].of(model).sequences.add(priority, key, -sequences)
    left = [rooms.of(model).sequences for rooms in frontends for model in ("chat@1", "code@1")]
    assert {count.ahead(LOWEST) for count in left} == {0}
    assert not any(count.by_key(LOWEST) for count in left)
    for rooms in frontends:
        # There are not as many places as examples.
        rooms.end()
        rooms.end = lambda: None  # type: ignore[method-assign]


def test_what_is_held_counts_apart(make: Make) -> None:
    one, other = make().of("m"), make().of("m")
    one.held.add(0, "a", 2)
    assert (other.held.ahead(NORMAL), other.held.ahead(HIGH), other.sequences.ahead(LOWEST)) == (2, 0, 0)
    assert (other.held.by_key(LOWEST), other.sequences.by_key(LOWEST)) == ({mark_of("a"): 2}, {})


def test_more_models_than_rows_have_their_rows_one_after_the_other(make: Make) -> None:
    one, other = make(), make()
    for number in range(MOST_MODELS):
        one.of(f"m{number}").sequences.add(0, "", 1)
    one.of("late").sequences.add(0, "", 5)
    assert other.of("late").sequences.ahead(LOWEST) == 0
    one.of("late").sequences.add(0, "", -5)
    one.of("m7").sequences.add(0, "", -1)
    one.of("late").sequences.add(0, "", 5)
    assert other.of("late").sequences.ahead(LOWEST) == 5
    assert other.of("m7").sequences.ahead(LOWEST) == 0
    assert other.of("m8").sequences.ahead(LOWEST) == 1


def test_of_more_keys_than_fit_it_is_not_known_whose_it_is_and_how_much_is(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("components.frontend.limits.rooms.MOST_ENTRIES", 3)
    one, other = make().of("m").sequences, make().of("m").sequences
    for key in "abcd":
        one.add(0, key, 1)
    assert (other.ahead(LOWEST), set(other.by_key(LOWEST))) == (4, {mark_of(key) for key in "abc"})
    one.add(0, "d", -1)
    one.add(0, "a", -1)
    one.add(0, "d", 1)
    assert (other.ahead(LOWEST), set(other.by_key(LOWEST))) == (3, {mark_of(key) for key in "bcd"})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(seed=st.integers(0, 2**32), at=st.none() | st.integers(HEAD, END + 8192))
def test_a_damaged_file_ends_nothing_and_is_right_again_when_all_have_written(
    pair: tuple[Counting, Counting], seed: int, at: int | None
) -> None:
    counts = [rooms.of("m").sequences for rooms in pair]
    for count in counts:
        count.add(0, "a", 2)
    (begin, end) = (HEAD, END) if at is None else (at, at + 4096)
    pair[0].places.map[begin:end] = random.Random(seed).randbytes(end - begin)
    for count in counts:
        count.by_key(LOWEST)
        count.add(0, "a", 1)
    for count in counts:
        assert (count.by_key(LOWEST), count.ahead(LOWEST)) == ({mark_of("a"): 3}, 3)
    for count in counts:
        count.add(0, "a", -3)


def test_what_a_killed_frontend_had_is_dropped(make: Make, tmp_path: Path) -> None:
    survivor = make()
    survivor.note_under_way(2)
    assert in_child(lambda: count_and_die(tmp_path)) == -signal.SIGKILL
    sequences = survivor.of("m").sequences
    assert (sequences.ahead(LOWEST), survivor.under_way, survivor.other_connections) == (0, 2, 0)
    assert not sequences.by_key(LOWEST)


def test_the_next_frontend_at_a_place_has_nothing(make: Make, tmp_path: Path) -> None:
    assert in_child(lambda: count_and_die(tmp_path)) == -signal.SIGKILL
    make()
    other = make()
    assert other.under_way == 0
    assert (other.of("m").sequences.ahead(LOWEST), other.of("m").sequences.by_key(LOWEST)) == (0, {})


def count_and_die(tmp_path: Path) -> None:
    rooms = Rooms(Places(tmp_path / "run" / "limits"))
    rooms.of("m").sequences.add(0, "a", 3)
    rooms.note_under_way(3)
    rooms.note_connections(4)
    os.kill(os.getpid(), signal.SIGKILL)


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
        room = rooms.of("m")
        self.count = room.sequences
        self.entry = ModelEntry(["m"], lambda: self.why, limits, self._app, room=room)
        self.gate = HttpGate(
            self._app, limits=limits, models=ModelTable([self.entry]), is_draining=lambda: False, rooms=rooms
        )

    async def ask(self, key: str = "") -> Answer:
        asked = scope("/v1/completions")
        note_request(asked, RequestContext(caller=Caller(name=key)))
        return await call(self.gate.answer_own, asked, [b'{"model": "m", "prompt": "x"}'])

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
    assert (refused.status, int(refused.headers["retry-after"]) > 0) == (429, True)
    assert "max-held" in refused.error["message"]
    one.why, one.entry.app = None, one._app
    one.end.set()
    one.entry.look()
    assert (await held).status == 200


@pytest.mark.parametrize("is_ready", [True, False])
async def test_a_key_that_floods_one_frontend_leaves_another_key_its_share_at_each(make: Make, is_ready: bool) -> None:
    limits = AdmissionLimits(max_requests=4) if is_ready else AdmissionLimits(max_held=4)
    one, other = frontends = [Frontend(make(), limits) for _ in range(2)]
    for each in frontends:
        if not is_ready:
            each.why, each.entry.app = "no worker is ready", None
    under_way = [asyncio.create_task(one.ask("flood")) for _ in range(4)]
    await eventually(lambda: one.entry.demand == 4)
    for number, each in enumerate((other, one), 1):
        under_way.append(asyncio.create_task(each.ask("late")))
        await eventually(lambda number=number: one.entry.demand + other.entry.demand == 4 + number)  # type: ignore[misc]
    for each in frontends:
        for key in ("flood", "late"):
            refused = await each.ask(key)
            assert (refused.status, refused.error["code"]) == (429, LIMITED)
    for each in frontends:
        each.why, each.entry.app = None, each._app
        each.end.set()
        each.entry.look()
    assert {(await each).status for each in under_way} == {200}
    assert {each.entry.demand for each in frontends} == {0}
    assert not frontends[0].count.by_key(LOWEST)
