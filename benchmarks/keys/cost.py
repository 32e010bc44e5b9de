"""CPU that the frontend takes to check a key and its limits, in process: its gate before an application that submits.

With one key of a thousand that has every limit, and without any key: the difference is what keys cost. Both take turns.
Wrong keys: one whose digest begins like a right one's, and one of another length, beside one at random.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.harness.report import Figures, table
from benchmarks.harness.spread import bootstrap
from components.frontend.http.callers import Callers
from components.frontend.http.gate import HttpGate
from components.frontend.http.models import ModelEntry, ModelTable
from components.frontend.keys.known import KnownKeys
from components.frontend.keys.ticket import Ticket
from components.frontend.limits.places import Counters, Places
from components.frontend.request_context import request_here, tally_of
from dynamo_local.core.http.asgi import Event, Receive, Scope, Send, headers_of
from dynamo_local.core.http.bounds.admission import AdmissionLimits
from dynamo_local.core.keys.registry import MOST_KEYS, KeyRegistry, create_key
from dynamo_local.core.keys.values import ApiKey, KeyTerms, digest_of
from dynamo_local.core.ports import Request
from dynamo_local.supervisor.keys.orders import new_secret
from state.documents import DocumentStore
from state.keys import KEYS
from state.locks import ServerLock
from state.paths import StatePaths

LIMIT_US = 20.0
"""What a key and its limits may take for a request."""

_BODY = msgspec.json.encode({"model": "m", "prompt": "the quick brown fox", "max_tokens": 16})
_TOKENS = tuple(range(20))
_MOST = 1_000_000_000


async def measure(rounds: int, requests: int) -> Figures:
    """Measure, print, and return the figures."""
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        paths = StatePaths(Path(scratch), "bench")
        secrets = _registry(paths)
        counters = Counters(Places(paths.limits_file))
        known, admit = KnownKeys(paths, counters.keys_changed), partial(Ticket, counters, time.monotonic)
        gates = {"open": (_gate(None, None), ""), "key": (_gate(known, admit), secrets[MOST_KEYS // 2])}
        spent: dict[str, list[float]] = {name: [] for name in gates}
        wrong = _guesses(secrets)
        guesses: dict[str, list[float]] = {name: [] for name in wrong}
        callers = Callers(known=known)
        for _ in range(rounds):
            for name, (gate, key) in gates.items():
                spent[name].append(await _us_each(gate, key, requests))
            for name, key in wrong.items():
                guesses[name].append(_find_us(callers, key, requests))
    more = [with_key - without for with_key, without in zip(spent["key"], spent["open"], strict=True)]
    rows = [
        ["the gate, no key", bootstrap(spent["open"]).shown()],
        [f"the gate, one of {MOST_KEYS} keys with all limits", bootstrap(spent["key"]).shown()],
        [f"difference; at most {LIMIT_US:g}", bootstrap(more).shown()],
        *([f"the search for {name}", bootstrap(values).shown()] for name, values in guesses.items()),
    ]
    table("CPU of a request", ["", "us"], rows)
    return {"requests": requests, "us_each": spent, "more_us": more, "limit_us": LIMIT_US, "search_us": guesses}


def _registry(paths: StatePaths) -> list[str]:
    """As many keys as there may be, each with all limits. Returns their secrets."""
    secrets, registry = [new_secret() for _ in range(MOST_KEYS)], KeyRegistry()
    keys = {}
    for number, secret in enumerate(secrets):
        terms = KeyTerms(
            name=f"k{number}",
            endpoints=("m",),
            requests_per_minute=_MOST,
            tokens_per_minute=_MOST,
            requests_at_once=1000,
            best_priority=0,
            expires_at=1e11,
        )
        one = create_key(KeyRegistry(), terms, digest_of(secret.encode()), 0.0).keys[terms.name]
        keys[one.name] = msgspec.structs.replace(one, number=number + 1, slot=number)
    registry = KeyRegistry(keys, MOST_KEYS + 1)
    with ServerLock(paths) as lock:
        DocumentStore(KEYS, lock).write(registry)
    return secrets


def _gate(known: KnownKeys | None, admit: Callable[[ApiKey], Ticket] | None) -> HttpGate:
    models = ModelTable([ModelEntry(("m",), lambda: None, AdmissionLimits(), _answer)])
    return HttpGate(
        _answer,
        limits=AdmissionLimits(),
        models=models,
        is_draining=lambda: False,
        known_keys=known,
        admit=admit,
    )


def _guesses(secrets: list[str]) -> dict[str, str]:
    """A right key, and wrong ones; of one, the digest begins with the same two bytes as a right one's."""
    beginnings = {digest_of(secret.encode())[:4] for secret in secrets}
    near = next(guess for guess in iter(new_secret, "") if digest_of(guess.encode())[:4] in beginnings)
    return {
        "a right key": secrets[0],
        "a wrong one": new_secret(),
        "one whose digest begins like a right one's": near,
        "one that begins like a right one": secrets[0][:-1] + ("A" if secrets[0][-1] != "A" else "B"),
    }


async def _us_each(gate: HttpGate, key: str, requests: int) -> float:
    """CPU of a request, in microseconds. Each is a task of its own, as those of a server are: what one leaves in the
    context of its task, and the timers that it has cancelled, do not stay."""
    scope = _scope(key)
    begun = time.process_time()
    for _ in range(requests):
        await asyncio.create_task(_request(gate, scope), name="request")
    return (time.process_time() - begun) / requests * 1e6


async def _request(gate: HttpGate, scope: Scope) -> None:
    await gate(scope, _receive, _ignore)


def _find_us(callers: Callers, key: str, requests: int) -> float:
    headers = headers_of(_scope(key))
    begun = time.process_time()
    for _ in range(requests):
        callers.find(headers)
    return (time.process_time() - begun) / requests * 1e6


def _scope(key: str) -> dict[str, Any]:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(_BODY)).encode())]
    if key:
        headers.append((b"authorization", b"Bearer " + key.encode()))
    return {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}


async def _receive() -> Event:
    return {"type": "http.request", "body": _BODY, "more_body": False}


async def _ignore(event: Event) -> None:
    assert event.get("status", 200) == 200, event


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Take the request, submit it as the dispatcher does, and answer it with nothing."""
    await receive()
    context = request_here()
    request = context.prioritized(Request("r", _TOKENS, None, 0.0, max_tokens=16))  # type: ignore[arg-type]
    assert context.charge(request) is None
    tally_of(scope).add("p", len(_TOKENS), 0, 8)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}", "more_body": False})
