"""Requests are metered: what each has used is written once, and before its client has the whole answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from components.frontend.http.callers import API_KEY_FILE
from components.frontend.http.gate import HttpGate
from components.frontend.http.models import ModelEntry, ModelTable
from components.frontend.http.usage import UsageMeter
from components.frontend.request_context import request_here, tally_of
from dynamo_local.core.http.asgi import Event, Receive, Scope, Send
from dynamo_local.core.http.bounds.admission import AdmissionLimits
from dynamo_local.core.usage.records import Tally, UsageRecord
from tests.unit.frontend.asgi_driver import Answer, call, scope

PATH = "/v1/completions"
START: Event = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


def part(body: bytes, *, more: bool = True) -> Event:
    return {"type": "http.response.body", "body": body, "more_body": more}


class Scene:
    """A gate whose application plays a script: events that it sends, and what engines do to its tally in between."""

    def __init__(self, *script: Any, worker: bool = True, **entry: Any) -> None:
        self.script = script
        self.order: list[Any] = []
        """Records written and parts sent, as they came."""
        self.scopes: list[Scope] = []
        limits = AdmissionLimits(max_requests=4, hold_timeout_s=0)
        why = None if worker else "no worker is ready"
        self.entry = ModelEntry(["m", "also", "french"], lambda: why, limits, self.app, **entry)
        self.gate = HttpGate(
            self.app,
            limits=limits,
            models=ModelTable([self.entry]),
            is_draining=lambda: False,
            api_keys=("plain",),
            meter=UsageMeter(self.order.append, clock=iter(range(100)).__next__, wall_clock=lambda: 7.0),
        )

    async def app(self, asked: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(asked)
        for each in self.script:
            if callable(each):
                # As a task of the application's own, such as one for each prompt.
                await asyncio.create_task(each())
            else:
                await send(each)

    async def ask(self, body: Any = None, leaves: asyncio.Event | None = None) -> Answer:
        async def noting(asked: Scope, receive: Receive, send: Send) -> None:
            async def send_on(event: Event) -> None:
                self.order.append(event.get("body", event.get("status")))
                await send(event)

            await self.gate(asked, receive, send_on)

        asked = scope(PATH, headers=[("authorization", "Bearer plain")])
        return await call(noting, asked, [json.dumps(body or {}).encode()], leaves=leaves)

    @property
    def records(self) -> list[UsageRecord]:
        return [each for each in self.order if isinstance(each, UsageRecord)]


def engines(prompt_id: str = "a", prompt: int = 5, cached: int = 2, output: int = 1, *, ends: bool = True) -> Any:
    """What engines do: one request, with its output."""

    async def run() -> None:
        tally = request_here().tally
        assert tally is not None
        tally.begin()
        tally.add(prompt_id, prompt, cached, output)
        if ends:
            tally.end()

    return run


async def test_a_record_is_written_before_the_client_is_told_what_was_used() -> None:
    scene = Scene(START, engines(ends=False), part(b"one"), engines(), part(b"usage"), part(b"", more=False))
    scene.script = (START, engines(), part(b"usage"), part(b"", more=False))
    await scene.ask({"model": "m"})
    record = UsageRecord(7.0, "m", API_KEY_FILE, PATH, 200, prompt=5, cached=2, output=1, seconds=1.0)
    assert scene.order == [200, record, b"usage", b""]
    assert (tally_of(scene.scopes[0]).total, request_here().tally) == (6, None)


async def test_nothing_is_written_while_engines_go_on() -> None:
    scene = Scene(START, engines(ends=False), part(b"one"), engines(ends=False), part(b"", more=False))
    await scene.ask()
    assert [type(each) for each in scene.order] == [int, bytes, UsageRecord, bytes]
    assert [(each.prompt, each.output) for each in scene.records] == [(5, 2)]


async def test_what_is_used_after_a_record_is_in_another() -> None:
    turns = (engines("first"), part(b"tool"), engines("second", 9, 5, 3), part(b"", more=False))
    scene = Scene(START, *turns)
    await scene.ask()
    first, second = scene.records
    assert (first.requests, first.prompt, first.cached, first.output) == (1, 5, 2, 1)
    assert (second.requests, second.prompt, second.cached, second.output, second.seconds) == (0, 9, 5, 3, 0.0)


@pytest.mark.parametrize("script", [(engines(ends=False),), (START, engines(ends=False), part(b"one"))])
async def test_clients_that_leave_are_charged_what_was_generated(script: Any) -> None:
    scene = Scene(*script)
    await scene.ask()
    assert [(each.status, each.prompt, each.output) for each in scene.records] == [(499, 5, 1)]


async def test_failures_are_recorded_with_their_status() -> None:
    bad: Event = {"type": "http.response.start", "status": 400, "headers": []}
    scene = Scene(bad, part(b"bad", more=False))
    await scene.ask()
    assert [(each.status, each.prompt, each.requests) for each in scene.records] == [(400, 0, 1)]

    class BrokenError(Exception):
        pass

    async def breaks() -> None:
        raise BrokenError

    scene = Scene(engines(ends=False), breaks)
    with pytest.raises(BrokenError):
        await scene.ask()
    assert [(each.status, each.output) for each in scene.records] == [(499, 1)]


async def test_a_request_that_is_held_in_vain_is_recorded_and_one_that_is_refused_is_not() -> None:
    scene = Scene(lambda: asyncio.sleep(0), worker=False)
    assert (await scene.ask()).status == 503
    assert scene.records == []

    scene = Scene(START, part(b"", more=False))
    assert (await scene.ask({"n": 100})).status == 400
    assert scene.records == []


@pytest.mark.parametrize(
    ("asked", "counted"), [(None, "m"), ("m", "m"), ("also", "m"), ("french", "french"), ("other", None), (3, None)]
)
async def test_requests_count_for_the_endpoint_or_the_adapter(asked: Any, counted: str | None) -> None:
    scene = Scene(START, part(b"", more=False), adapters=frozenset({"french"}))
    await scene.ask({} if asked is None else {"model": asked})
    assert [each.endpoint for each in scene.records] == ([] if counted is None else [counted])


async def test_a_search_of_beams_counts_as_its_answer_tells() -> None:
    usage = {"usage": {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}}
    steps = [engines(f"step {number}", 4 + number) for number in range(3)]
    scene = Scene({**START, "headers": []}, *steps, part(json.dumps(usage).encode(), more=False))
    await scene.ask({"use_beam_search": True})
    assert [(each.prompt, each.cached, each.output) for each in scene.records] == [(4, 4, 6)]


async def test_requests_at_the_same_time_do_not_mix() -> None:
    scene = Scene(START, engines(), part(b"", more=False))
    await asyncio.gather(*(scene.ask() for _ in range(4)))
    assert [(each.prompt, each.output) for each in scene.records] == [(5, 1)] * 4


async def test_the_tally_of_a_held_request_is_known_where_it_is_submitted() -> None:
    found: list[Tally | None] = []

    async def submits() -> None:
        done = asyncio.Event()

        def submit() -> None:
            found.append(request_here().tally)
            done.set()

        request_here().submit(submit)
        await done.wait()

    scene = Scene(submits, START, part(b"", more=False))
    await scene.ask()
    assert found == [tally_of(scene.scopes[0])]
