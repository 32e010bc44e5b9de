"""Orders about endpoints by the control API: what each is answered with, and what has happened by then."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamo_local.control.errors import error_of
from dynamo_local.control.operations import MOST_BYTES, OPERATIONS
from dynamo_local.core.endpoints.registry import Entry, Registry
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import StateError
from dynamo_local.core.http.paths import route_of
from dynamo_local.core.messages.endpoints import AdapterOrdered, EndpointStatus, EndpointView, shown, view_of
from dynamo_local.core.messages.reports import Event
from dynamo_local.supervisor.control.api import ControlApi
from dynamo_local.supervisor.control.http import application
from dynamo_local.supervisor.endpoints.adapters import AdapterFolders
from dynamo_local.supervisor.endpoints.kept_registry import KeptRegistry
from dynamo_local.supervisor.endpoints.orders import Orders
from state.endpoints.registry import RegistryStore, read_registry
from state.locks import ServerLock
from state.paths import StatePaths
from tests.unit.frontend.asgi_driver import Answer, call, scope
from tests.unit.supervisor.endpoints.made_parts import Record

ALL = "/v1/endpoints"
ONE = "/v1/endpoints/chat"
SCALED = "/v1/endpoints/chat/scale"
PARKED = "/v1/endpoints/chat/park"
WOKEN = "/v1/endpoints/chat/wake"
CHAT = '{"name": "chat", "model": "m", "max_workers": 2}'


class Run:
    """What runs for an endpoint: nothing; what it is told is noted."""

    answers, takes = False, None

    def __init__(self, entry: Entry, told: list[str]) -> None:
        self.entry = entry
        self.deleting = False
        self.idleness = SimpleNamespace(rest="")
        self._told = told

    def order(self, entry: Entry, *, replace: bool) -> None:
        self.entry = entry
        self._told.append(f"order {replace}")

    def scale(self, workers: int | None, prefill_workers: int | None) -> None:
        self._told.append(f"scale {workers} {prefill_workers}")

    def rest(self, how: str) -> None:
        self._told.append(how)

    def wake(self, *, asked: bool) -> None:
        self._told.append(f"wake {asked}")

    def delete(self) -> None:
        self.deleting = True


class Office:
    """The orders of a server that runs nothing. `told`: what was done, in turn."""

    def __init__(self, lock: ServerLock) -> None:
        self.paths = lock.paths
        self.told: list[str] = []
        self.events: list[Event] = []
        self.runs: dict[str, Run] = {}
        self.kept = KeptRegistry(RegistryStore(lock), Registry())
        self.disk_is_full = False
        record: Any = Record(events=self.events)
        me: Any = self
        adapters = AdapterFolders(self.kept, me.runs, record, on_cpu=True)
        orders = Orders(self.kept, me, adapters, me, record, frozenset({"own"}), lambda: 7.0)
        self.api = ControlApi()
        self.api.take(orders.handlers)
        self.app = application(self.api)

    async def ask(self, method: str, path: str, body: str | bytes = b"", query: str = "", by: str = "") -> Answer:
        headers = [("x-dynamo-key", by)] if by else []
        asked = scope(path, method, headers, query_string=query.encode())
        return await call(self.app, asked, [body.encode() if isinstance(body, str) else body])

    def run_of(self, name: str) -> Run | None:
        return self.runs.get(name)

    def begin(self, entry: Entry) -> None:
        if entry.spec.adapter_of is None:
            self.runs[entry.spec.name] = Run(entry, self.told)

    def view(self, name: str) -> EndpointView | None:
        return next((view for view in self.views() if view.spec.name == name), None)

    def views(self) -> tuple[EndpointView, ...]:
        specs = {run.entry.spec.name: run.entry.spec for run in self.runs.values()}
        specs |= {name: entry.spec for name, entry in self.kept.current.entries.items()}
        return tuple(EndpointView(spec, EndpointStatus("starting", "soon"), 1.0, 2.0) for spec in specs.values())

    async def check_machine(self, *_: object) -> None:
        await asyncio.sleep(0)

    async def check_update(self, *_: object) -> None:
        await asyncio.sleep(0)

    async def check_wake(self, _: object) -> None:
        self.told.append("a device is looked for")

    def touch(self) -> None:
        pass

    async def publish(self) -> None:
        self.told.append("board")
        if self.disk_is_full:
            raise StateError("the disk is full")


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    with ServerLock(StatePaths(tmp_path, "dynamo")) as lock:
        yield Office(lock)


async def test_an_order_is_on_disk_and_on_the_board_when_it_is_answered(office: Office) -> None:
    created = await office.ask("POST", ALL, CHAT)
    content = json.loads(created.body)
    assert (created.status, content["object"], content["name"], content["min_workers"]) == (201, "endpoint", "chat", 1)
    assert (content["status"]["state"], content["status"]["ready"]) == ("starting", 0)
    assert "adapter" not in content
    assert read_registry(office.paths).entry("chat").spec.model == "m"
    assert office.told == ["board"]
    assert json.loads((await office.ask("GET", ALL)).body) == {"object": "list", "data": [content]}
    assert json.loads((await office.ask("GET", ONE)).body) == content
    # What is on the registry's disk holds, if the board has to follow later.
    office.disk_is_full = True
    assert (await office.ask("PUT", ONE, '{"max_workers": 3}')).status == 202
    assert read_registry(office.paths).entry("chat").spec.max_workers == 3


@pytest.mark.parametrize(
    ("method", "path", "body", "query", "status", "told"),
    [
        ("PATCH", ONE, '{"name": "chat", "max_workers": null}', "", 202, ["order False", "board"]),
        ("PUT", ONE, '{"model": "n", "replace": true}', "", 202, ["order True", "board"]),
        ("POST", SCALED, '{"workers": 2}', "", 202, ["scale 2 None", "board"]),
        ("POST", SCALED, '{"workers": 1, "prefill_workers": 0}', "", 202, ["scale 1 0", "board"]),
        ("POST", PARKED, "", "", 202, ["parked"]),
        ("POST", WOKEN, "{}", "", 202, ["a device is looked for", "wake False"]),
        ("POST", WOKEN, "", "asked=true", 202, ["wake True"]),
        ("DELETE", ONE, "", "", 202, ["board"]),
    ],
)
async def test_each_order_is_carried_out_and_who_gave_it_is_noted(
    office: Office, method: str, path: str, body: str, query: str, status: int, told: list[str]
) -> None:
    await office.ask("POST", ALL, CHAT)
    office.told.clear()
    assert office.events == [], "the owner of the server is not noted"
    answer = await office.ask(method, path, body, query, by="boss")
    assert (answer.status, json.loads(answer.body)["name"], office.told) == (status, "chat", told)
    (event,) = office.events
    word = {"PATCH": "update", "PUT": "update", "DELETE": "delete"}.get(method) or path.rpartition("/")[2]
    assert (event.what, event.why, event.endpoint) == (f"{word} ordered", "by key boss", "chat")
    # What frontends open to administrators is the same path.
    route = route_of(path)
    assert route is not None
    assert route.admin
    assert method in route.methods


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", ALL, "", 400),
        ("POST", ALL, "[1]", 400),
        ("POST", ALL, '{"a": NaN}', 400),
        ("POST", ALL, "[" * 100_000, 400),
        ("POST", ALL, '{"model": "' + "x" * MOST_BYTES + '"}', 413),
        ("POST", ALL, '{"name": "x"}', 400),
        ("POST", ALL, '{"name": "x", "model": "m", "roll": true}', 400),
        ("POST", ALL, CHAT, 409),
        ("POST", ALL, '{"name": "own", "model": "m"}', 409),
        ("GET", "/v1/endpoints/Chat", "", 400),
        ("GET", "/v1/endpoints/nobody", "", 404),
        ("DELETE", "/v1/endpoints/nobody", "", 404),
        ("PATCH", ONE, "", 400),
        ("PATCH", ONE, '{"name": "other"}', 400),
        ("PATCH", ONE, '{"args": 1}', 400),
        ("POST", SCALED, "{}", 400),
        ("POST", SCALED, '{"workers": -1}', 400),
        ("POST", SCALED, '{"workers": 1.5}', 400),
        ("POST", SCALED, '{"workers": true}', 400),
        ("POST", SCALED, '{"workers": 99999999999}', 400),
        ("POST", SCALED, '{"workers": 3}', 400),
        ("POST", SCALED, '{"replicas": 1}', 400),
        ("POST", PARKED, '{"asked": true}', 400),
        ("POST", WOKEN, '{"asked": true}', 400),
        ("POST", WOKEN, "[]", 400),
    ],
)
async def test_what_is_refused_has_changed_nothing(
    office: Office, method: str, path: str, body: str, status: int
) -> None:
    await office.ask("POST", ALL, CHAT)
    before = read_registry(office.paths)
    office.told.clear()
    refused = await office.ask(method, path, body, by="boss")
    assert (refused.status, json.loads(refused.body)["error"]["code"]) == (status, status)
    assert (read_registry(office.paths), office.told, office.events) == (before, [], [])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.sampled_from(
        [operation for operation in OPERATIONS if operation.path.startswith(ALL) and operation.method != "GET"]
    ),
    st.binary(),
)
async def test_whatever_a_body_is_the_answer_is_one(office: Office, operation: Any, body: bytes) -> None:
    answer = await office.ask(operation.method, operation.path_for({"name": "chat"}), body)
    assert answer.status in (200, 201, 202, 400, 404)


async def test_orders_at_once_are_carried_out_one_after_the_other(office: Office) -> None:
    answers = await asyncio.gather(*(office.ask("POST", ALL, CHAT) for _ in range(5)))
    assert sorted(answer.status or 0 for answer in answers) == [201, 409, 409, 409, 409]


async def test_what_is_asleep_and_what_is_being_deleted_takes_no_such_order(office: Office) -> None:
    await office.ask("POST", ALL, CHAT)
    office.runs["chat"].idleness.rest = "asleep"
    for path, body in ((SCALED, '{"workers": 1}'), (PARKED, "")):
        assert (await office.ask("POST", path, body)).status == 409
    assert (await office.ask("DELETE", ONE)).status == 202
    assert json.loads((await office.ask("POST", ALL, CHAT)).body)["error"]["message"].startswith(
        "endpoint chat is still being deleted"
    )
    del office.runs["chat"]
    assert (await office.ask("GET", ONE)).status == 404


async def test_a_server_that_stops_takes_no_orders(office: Office) -> None:
    office.api.withdraw(OPERATIONS)
    refused = await office.ask("POST", ALL, CHAT)
    assert (refused.status, refused.headers["retry-after"]) == (503, "2")
    assert error_of(503, refused.body).cause == "the server is stopping"
    assert office.kept.current == Registry()


async def test_an_adapter_is_gone_at_once(office: Office) -> None:
    await office.ask("POST", ALL, CHAT)
    del office.runs["chat"]
    adapter = '{"name": "pirate", "model": "/lora", "adapter_of": "chat"}'
    assert (await office.ask("POST", ALL, adapter)).status == 201
    for action, status in ((SCALED, 400), (PARKED, 409)):
        refused = await office.ask("POST", action.replace("chat", "pirate"), '{"workers": 1}' if status == 400 else "")
        assert (refused.status, "is an adapter" in json.loads(refused.body)["error"]["message"]) == (status, True)
    gone = await office.ask("DELETE", "/v1/endpoints/pirate", by="boss")
    assert (gone.status, json.loads(gone.body)) == (200, {"object": "endpoint", "name": "pirate", "deleted": True})
    assert [event.endpoint for event in office.events] == ["pirate"]


@pytest.mark.parametrize("adapter", [None, AdapterOrdered("rolled", "chat is rolled")])
def test_what_is_shown_is_an_endpoint_again_where_it_arrives(adapter: AdapterOrdered | None) -> None:
    spec = EndpointSpec(name="chat", model="m", args={"a": [1, 2.5, None]}, awake=("daily 08:00-09:00",))
    view = EndpointView(spec, EndpointStatus("starting", "soon"), 1.0, 2.0, ("chat", "talk"), adapter)
    content = json.loads(msgspec.json.encode(shown(view)))
    assert view_of(content) == view
    assert content.get("adapter") == (None if adapter is None else {"result": "rolled", "reason": "chat is rolled"})
