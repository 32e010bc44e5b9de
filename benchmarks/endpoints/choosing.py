"""CPU that the frontend takes to choose among endpoints, in process: its gate before applications that do nothing.

The gate reads the body, finds the model, checks the bounds and counts what is in flight. With one model it chooses as
well, among one; the difference is what the others cost. Both take turns.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from benchmarks.harness.report import Figures, table
from benchmarks.harness.spread import Interval, bootstrap
from components.frontend.http.gate import HttpGate
from components.frontend.http.models import ModelEntry, ModelTable
from dynamo_local.core.http.asgi import Event, Receive, Scope, Send
from dynamo_local.core.http.bounds.admission import AdmissionLimits

LIMIT_US = 30.0
"""What choosing may take for a request."""
_PROMPT = "the quick brown fox jumps over the lazy dog " * 40


async def measure(rounds: int, requests: int, many: int) -> Figures:
    """Measure, print, and return the figures."""
    gates = {number: _gate(number) for number in (1, many)}
    found = _table(many)
    spent: dict[str, list[float]] = {"1": [], str(many): [], "find": []}
    for _ in range(rounds):
        for number, gate in gates.items():
            spent[str(number)].append(await _us_each(gate, number, requests))
        spent["find"].append(_find_us(found, many, requests))
    more = [with_many - with_one for with_one, with_many in zip(spent["1"], spent[str(many)], strict=True)]
    _show(many, {name: bootstrap(values) for name, values in (spent | {"more": more}).items()})
    return {"endpoints": many, "requests": requests, "us_each": spent, "more_us": more, "limit_us": LIMIT_US}


def _gate(models: int) -> HttpGate:
    return HttpGate(_answer, limits=AdmissionLimits(), models=_table(models), is_draining=lambda: False)


def _table(models: int) -> ModelTable:
    """Endpoints, each of which has an adapter."""
    return ModelTable(
        ModelEntry((_name(number), f"{_name(number)}-adapter"), lambda: None, AdmissionLimits(), _answer)
        for number in range(models)
    )


def _name(number: int) -> str:
    return f"endpoint-{number}"


async def _us_each(gate: HttpGate, models: int, requests: int) -> float:
    """CPU of a request, in microseconds."""
    bodies = [msgspec.json.encode({"model": _name(n), "prompt": _PROMPT, "max_tokens": 16}) for n in range(models)]
    scopes = [_scope(body) for body in bodies]
    begun = time.process_time()
    for number in range(requests):
        turn = number % models
        await gate(scopes[turn], _receiving(bodies[turn]), _ignore)
    return (time.process_time() - begun) / requests * 1e6


def _find_us(models: ModelTable, number: int, requests: int) -> float:
    names = [_name(turn % number) for turn in range(requests)]
    begun = time.process_time()
    for name in names:
        models.find(name)
    return (time.process_time() - begun) / requests * 1e6


def _scope(body: bytes) -> dict[str, Any]:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    return {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}


def _receiving(body: bytes) -> Receive:
    async def receive() -> Event:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


async def _ignore(_: Event) -> None:
    pass


async def _answer(_: Scope, receive: Receive, send: Send) -> None:
    """Take the request and answer it with nothing, as an application would."""
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}", "more_body": False})


def _show(many: int, spent: Mapping[str, Interval]) -> None:
    rows = [
        ["the gate, one model", spent["1"].shown()],
        [f"the gate, {many} endpoints with an adapter each", spent[str(many)].shown()],
        [f"difference; at most {LIMIT_US:g}", spent["more"].shown()],
        [f"the search among {many} alone", spent["find"].shown()],
    ]
    table("CPU of a request", ["", "us"], rows)
