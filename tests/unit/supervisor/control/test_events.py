"""Events as the control API tells them: who comes back with the id of the last one that it has seen misses none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.control.events import events_of
from dynamo_local.core.errors import NotRunningError, UsageError
from dynamo_local.core.messages.reports import PASSING_KINDS, Event
from dynamo_local.supervisor.control.api import ControlApi
from dynamo_local.supervisor.control.http import application
from dynamo_local.supervisor.control.reports import EventAnswers
from dynamo_local.supervisor.server.reports.event_log import MAX_RECENT, RECENT_S, EventLog, RecentEvents
from state.locks import ServerLock
from state.paths import StatePaths
from tests.unit.supervisor.control.listening import listening
from tests.unit.supervisor.recording import RecordingReport

KINDS = ("scale", "drain", "death", "request", "state")
PATIENCE_S = 20.0


def named(number: int, kind: str = "scale") -> Event:
    return Event(kind, f"event {number}", time=float(number + 1))


@dataclass
class Station:
    """Tells events by the API of a server that began at `began`."""

    began: float = 1000.0
    now: float = 0.0
    answers: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.recent = RecentEvents(self.began, lambda: self.now)
        self.api = ControlApi()
        self.api.take(EventAnswers(self.recent, **self.answers).handlers)

    async def get(self, query: str = "", **headers: str) -> httpx.Response:
        transport = httpx.ASGITransport(application(self.api))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.get(f"/v1/events{query}", headers=headers)

    async def listed(self, query: str = "") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self.get(query)).raise_for_status().json()["data"]
        return found

    async def stream(self, after: str = "", query: str = "") -> list[tuple[str, Event]]:
        """What a reader has been told by the time that the server ends."""
        answer = await self.get(query, accept="text/event-stream", **{"last-event-id": after} if after else {})
        assert answer.headers["content-type"].startswith("text/event-stream")
        return messages(answer.text)


def messages(text: str) -> list[tuple[str, Event]]:
    """Ids and events of a stream."""
    found = []
    for message in text.split("\n\n"):
        if not message.startswith(":") and message:
            told, data = message.split("\n")
            found.append((told.removeprefix("id: "), Event(**without_id(json.loads(data.removeprefix("data: "))))))
    return found


def without_id(shown: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in shown.items() if name not in ("id", "v")}


async def test_the_list_has_the_events_of_the_last_hour_with_their_ids() -> None:
    station = Station()
    for number in range(3):
        station.now = number * RECENT_S / 2
        station.recent.add(named(number))
    assert [one["id"] for one in await station.listed()] == ["1000000.1", "1000000.2", "1000000.3"]
    station.now += 1
    station.recent.add(named(3, "death"))
    shown = await station.listed()
    assert shown[-1] == {"id": "1000000.4", "kind": "death", "what": "event 3", "time": 4.0}
    assert [one["what"] for one in shown] == ["event 1", "event 2", "event 3"]
    assert [one["id"] for one in await station.listed("?after=1000000.3")] == ["1000000.4"]
    assert [one["id"] for one in await station.listed("?kind=death,drain")] == ["1000000.4"]


async def test_who_asks_from_now_on_learns_after_which_id_that_is() -> None:
    station = Station()
    station.recent.add(named(0))
    answer = (await station.get("?after=now")).json()
    assert (answer["data"], answer["last"]) == ([], "1000000.1")
    station.recent.add(named(1, "state"))
    found = await station.listed(f"?after={answer['last']}&kind=state")
    assert [one["what"] for one in found] == ["event 1"]


@pytest.mark.parametrize("after", ["999000.2", "2", "", "1000000.x", "1000000.", "1000000.-1", "\u0662"])
async def test_an_id_of_another_server_or_none_leaves_no_event_out(after: str) -> None:
    station = Station()
    for number in range(3):
        station.recent.add(named(number))
    assert len(await station.listed(f"?after={after}")) == 3


async def test_a_kind_that_there_is_not_is_refused() -> None:
    answer = await Station().get("?kind=scale,quake")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "kind")


async def test_no_more_are_kept_than_fit() -> None:
    station = Station()
    for number in range(MAX_RECENT + 5):
        station.recent.add(named(number))
    found = station.recent.after(0)
    assert (len(found), found[0].number) == (MAX_RECENT, 6)


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.booleans()), max_size=30), st.sets(st.sampled_from(KINDS)))
async def test_a_reader_that_is_cut_again_and_again_is_told_each_event_once(
    steps: Sequence[tuple[str, bool]], wanted: set[str]
) -> None:
    """Each step adds an event; some cut the reader's stream, which then goes on from the last id that it has seen."""
    station = Station()
    told: list[tuple[str, Event]] = []
    query = f"?kind={','.join(sorted(wanted))}" if wanted else ""
    for number, (kind, cuts) in enumerate(steps):
        station.recent.add(named(number, kind))
        if cuts:
            station.recent.ended = True
            told += await station.stream(told[-1][0] if told else "", query)
            station.recent.ended = False
    station.recent.end()
    told += await station.stream(told[-1][0] if told else "", query)
    asked_for = wanted or {*KINDS} - PASSING_KINDS.keys()
    meant = [named(number, kind) for number, (kind, _) in enumerate(steps) if kind in asked_for]
    assert [event for _, event in told] == meant
    assert len({event_id for event_id, _ in told}) == len(told)


async def read(station: Station, take: Callable[[str], Awaitable[None]]) -> None:
    """Read a stream until it ends; `take` is called with each part."""
    scope = {"type": "http", "method": "GET", "path": "/v1/events", "query_string": b"", "http_version": "1.1"}
    scope |= {
        "raw_path": b"/v1/events",
        "headers": [(b"accept", b"text/event-stream")],
        "scheme": "http",
        "server": ("server", 80),
    }
    requests = iter([{"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> dict[str, Any]:
        request = next(requests, None)
        if request is None:
            await asyncio.Event().wait()
        assert request is not None
        return request

    async def send(message: Any) -> None:
        if message.get("body"):
            await take(message["body"].decode())

    async with asyncio.timeout(PATIENCE_S):
        await application(station.api)(scope, receive, send)


async def test_what_happens_while_a_reader_waits_is_told_at_once_and_silence_by_comments() -> None:
    station, taken = Station(answers={"heartbeat_s": 0.01}), list[str]()

    async def take(part: str) -> None:
        taken.append(part)
        if len(taken) == 1:
            station.recent.add(named(1))
        elif "event 1" in part:
            station.recent.end()

    await read(station, take)
    assert taken[0] == ":\n\n"
    assert [event.what for _, event in messages("".join(taken))] == ["event 1"]


async def test_a_reader_that_takes_nothing_is_cut() -> None:
    station = Station(answers={"taken_within_s": 0.01})
    station.recent.add(named(1))

    async def take(_: str) -> None:
        await asyncio.Event().wait()

    await read(station, take)


def test_an_event_is_told_with_the_time_at_which_it_was_written_down(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", RecordingReport(), wall_clock=lambda: 5.0)
    log.add(Event("scale", "undated"))
    (found,) = log.recent.after(0)
    assert (found.event.time, log.recent.id_of(found.number)) == (5.0, "5000.1")


async def test_a_client_goes_on_where_its_connection_was_lost_and_also_at_the_next_server(tmp_path: Path) -> None:
    paths = StatePaths(tmp_path, "dynamo")
    told = list[str]()

    def follow() -> None:
        for _, event in events_of(paths, timeout_s=PATIENCE_S, kinds=("scale",)):
            told.append(event.what)
            if event.what == "event 3":
                return

    async def heard(number: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(told) < number:  # noqa: ASYNC110 - a thread appends
                await asyncio.sleep(0.01)

    with ServerLock(paths):
        one = Station()
        one.recent.add(named(0))
        async with listening(one.api, paths, one.recent.end):
            following = asyncio.create_task(asyncio.to_thread(follow))
            await heard(1)
            one.recent.add(named(1, "death"))
            one.recent.add(named(1))
            await heard(2)
        one.recent.ended = False
        one.recent.add(named(2))
        async with listening(one.api, paths, one.recent.end):
            await heard(3)
        other = Station(began=2000.0)
        other.recent.add(named(3))
        async with listening(other.api, paths, other.recent.end):
            await following
            with pytest.raises(UsageError, match="no events of kind 'quake'"):
                await asyncio.to_thread(list, events_of(paths, timeout_s=PATIENCE_S, kinds=("quake",)))
            assert await asyncio.to_thread(list, events_of(paths, timeout_s=0.05, after="2000000.1")) == []
    assert told == ["event 0", "event 1", "event 2", "event 3"]
    with pytest.raises(NotRunningError):
        next(events_of(paths, timeout_s=PATIENCE_S))
