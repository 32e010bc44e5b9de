"""Requests that nobody waits for any more: vLLM's handlers do not go on with them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import FastAPI, Request
from vllm.entrypoints.serve.utils.api_utils import with_cancellation

from components.frontend.http.callers import ANYBODY
from components.frontend.http.gate import HttpGate
from components.frontend.http.models import ModelEntry, ModelTable
from components.frontend.http.own_requests import Answered, ask
from components.frontend.http.usage import UsageMeter
from components.frontend.request_context import request_here
from dynamo_local.core.http.bounds.admission import AdmissionLimits
from dynamo_local.core.usage.records import LEFT, UsageRecord
from tests.unit.frontend.asgi_driver import call, scope
from tests.unit.frontend.kept_scene import until

PATH, BODY = "/v1/completions", b'{"model": "m"}'


class House:
    """A gate, and behind it a handler like vLLM's that never has its answer."""

    def __init__(self, why: str | None = None) -> None:
        """`why`: the model has no worker."""
        self.why, self.comes = why, True
        self.submitted = asyncio.Event()
        self.working = 0
        """How many requests the handler has in work."""
        self.used: list[UsageRecord] = []
        app = FastAPI()

        @app.post(PATH)
        @with_cancellation  # type: ignore[untyped-decorator]
        async def complete(fields: dict[str, Any], raw_request: Request) -> None:
            self.working += 1
            try:
                request_here().submit(self.submitted.set)
                await asyncio.Event().wait()
            finally:
                self.working -= 1

        self.entry = ModelEntry(["m"], lambda: self.why, AdmissionLimits(), app, comes=lambda: self.comes)
        self.gate = HttpGate(
            app,
            limits=AdmissionLimits(),
            models=ModelTable([self.entry]),
            is_draining=lambda: False,
            meter=UsageMeter(self.used.append),
        )

    def ask(self) -> asyncio.Task[Answered]:
        return asyncio.create_task(ask(self.gate.answer_own, ANYBODY, PATH, BODY, 0))

    async def rests(self) -> None:
        """Wait until nothing is under way but what would stay so."""
        for _ in range(50):
            await asyncio.sleep(0)
        assert self.working == self.entry.demand == 0


async def test_a_request_of_the_frontend_that_is_cancelled_ends_in_the_engine() -> None:
    house = House()
    asked = house.ask()
    await house.submitted.wait()
    asked.cancel()
    await asyncio.wait({asked})
    assert asked.cancelled()
    await house.rests()
    # What vLLM answers to a client that has gone is nobody's.
    assert [record.status for record in house.used] == [LEFT]


@pytest.mark.parametrize("why", [None, "it is starting"])
async def test_it_ends_wherever_it_is(why: str | None) -> None:
    worked = False
    for steps in range(60):
        house = House(why)
        asked = house.ask()
        for _ in range(steps):
            await asyncio.sleep(0)
        worked = house.working > 0
        asked.cancel()
        await asyncio.wait({asked})
        await house.rests()
    assert worked, "the handler was not reached"


async def test_a_request_that_waits_for_its_model_ends_with_the_refusal_or_its_client() -> None:
    house = House("it is starting")
    leaves = asyncio.Event()
    asked = scope(PATH, headers=[("content-type", "application/json")], query_string=b"")
    left = asyncio.create_task(call(house.gate, {**asked}, [BODY], leaves=leaves))
    refused = asyncio.create_task(call(house.gate, {**asked}, [BODY]))
    await until(lambda: house.working == house.entry.demand == 2)
    leaves.set()
    await left
    house.why, house.comes = "it has failed", False
    house.entry.look()
    assert (await refused).status == 503
    await house.rests()
