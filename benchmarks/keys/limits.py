"""Limits of many keys under a load beyond them, while the frontend is killed with SIGKILL again and again.

Judged by what clients saw: a request was certainly admitted between its sending and its first event, and was certainly
in flight from there to its last event. So a stretch of time in which more requests of a key lie entirely than its limit
and rate allow, beside those that a killed frontend had under way, is a limit that did not hold. Usage is right if it is
that of all whole answers, and at most that of the ones that were cut off besides.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.endpoints.mockers import all_ready, mocker
from benchmarks.harness.generated import endpoint_of
from benchmarks.harness.report import Figures, progress, table
from benchmarks.harness.servers import Server, running, start_endpoints
from benchmarks.keys.judging import Judged, Seen, judge
from dynamo_local.load.client import Asking, Client
from dynamo_local.load.figures import Completion

_CLIENTS_EACH = 3
_PROMPT, _TOKENS = list(range(10, 30)), 8
_PAUSE_S = 0.05


async def measure(requests: int, keys: int, every_s: float) -> Figures:
    """Measure, print, and return the figures."""
    spec = mocker("chat", {"max-model-len": 2048}, min_workers=2, max_workers=2)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        server = start_endpoints(Path(scratch), [spec], ("--cpu-slots=2",))
        async with running(server):
            await all_ready(server, [spec])
            limits = [_limits(number) for number in range(keys)]
            secrets = await _create(server, limits)
            progress(f"{keys} keys")
            load = _Load(server, secrets, requests)
            kills = await load.run(every_s)
            usage = await _usage(server)
        seen = load.seen
    judged = [judge(seen[number], **limits[number], tokens=len(_PROMPT) + _TOKENS) for number in range(keys)]
    metered = [_metered(usage.get(f"k{number}", {}), load, number) for number in range(keys)]
    _show(load.outcomes, kills, judged, metered)
    return {
        "requests": sum(load.outcomes.values()),
        "outcomes": dict(load.outcomes),
        "kills": kills,
        "judged": [msgspec.to_builtins(each) for each in judged],
        "metered": [msgspec.to_builtins(each) for each in metered],
    }


class _Metered(msgspec.Struct, frozen=True):
    """Usage of a key, in tokens of prompts and answers together: what its clients were told, what is recorded, and the
    answers that a kill has cut off, which may be recorded as well."""

    told: int
    recorded: int
    cut_off: int

    @property
    def is_right(self) -> bool:
        return self.told <= self.recorded <= self.told + self.cut_off * (len(_PROMPT) + _TOKENS)


async def _usage(server: Server) -> dict[str, dict[str, int]]:
    answered = await server.dynamo("usage", "--by", "key", "--since", "1d")
    return {row["key"]: row for row in answered["data"]}


def _metered(row: dict[str, int], load: _Load, number: int) -> _Metered:
    recorded = row.get("prompt_tokens", 0) + row.get("output_tokens", 0)
    return _Metered(load.whole[number] * (len(_PROMPT) + _TOKENS), recorded, load.cut_off[number])


def _limits(number: int) -> dict[str, int]:
    """Limits of a key: of requests a minute, of tokens a minute, and of requests at once, in turns."""
    return (
        {"requests_per_minute": 20 + number},
        {"tokens_per_minute": 28 * (20 + number)},
        {"requests_at_once": 1 + number % 2, "requests_per_minute": 120},
    )[number % 3]


async def _create(server: Server, limits: list[dict[str, int]]) -> list[str]:
    """Create the keys by REST, as an administrator. Returns their secrets."""
    boss = await server.dynamo("key", "create", "boss", "--admin")
    headers = {"authorization": f"Bearer {boss['secret']}"}
    url = endpoint_of(server).url
    secrets = []
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60.0, trust_env=False) as client:
        for number, each in enumerate(limits):
            made = await client.post("/v1/keys", json={"name": f"k{number}", **each})
            secrets.append(str(made.raise_for_status().json()["secret"]))
    return secrets


class _Load:
    """Clients that ask as fast as they are answered, however that is, until there were so many requests."""

    def __init__(self, server: Server, secrets: list[str], requests: int) -> None:
        self.seen: list[list[Seen]] = [[] for _ in secrets]
        self.outcomes: Counter[str] = Counter()
        self.whole = Counter[int]()
        self.cut_off = Counter[int]()
        """Answers by number of the key: those that came to their end, and those that a kill may have cut off."""
        self._served = asyncio.Event()
        self._server, self._secrets, self._left = server, secrets, requests

    async def run(self, every_s: float) -> int:
        """Returns the number of kills."""
        clients = [
            asyncio.create_task(self._client(number), name=f"client of k{number}")
            for number in range(len(self._secrets))
            for _ in range(_CLIENTS_EACH)
        ]
        kills = asyncio.create_task(self._kill(every_s), name="kills")
        await asyncio.gather(*clients)
        kills.cancel()
        with suppress(asyncio.CancelledError):
            await kills
        return self.outcomes.pop("kills", 0)

    async def _client(self, number: int) -> None:
        endpoint = endpoint_of(self._server, self._secrets[number])
        asking = Asking("chat", is_chat=False, ignore_eos=True, extra={})
        async with Client(endpoint, asking, 60.0) as client:
            while self._left > 0:
                completion = await client.complete(_PROMPT, _TOKENS)
                self._note(number, completion)
                # What met no server is no request of the number that is to be made.
                if not completion.error or completion.error.startswith("HTTP"):
                    self._left -= 1
                    self._served.set()
                await asyncio.sleep(_PAUSE_S)

    def _note(self, number: int, done: Completion) -> None:
        self.outcomes[done.error or "answered"] += 1
        if not done.error:
            self.whole[number] += 1
        elif not done.error.startswith("HTTP"):
            self.cut_off[number] += 1
        if done.chunks_s:
            self.seen[number].append(Seen(done.at_s, done.chunks_s[0], done.chunks_s[-1]))

    async def _kill(self, every_s: float) -> None:
        while True:
            self._served.clear()
            await self._served.wait()
            await asyncio.sleep(every_s)
            self._server.refresh()
            for process in self._server.of_role("frontend"):
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                self.outcomes["kills"] += 1
            progress(f"killed at {time.monotonic():.0f} s; {self._left} requests left")


def _show(outcomes: Counter[str], kills: int, judged: list[Judged], metered: list[_Metered]) -> None:
    table("Requests", ["outcome", "number"], [[name, str(number)] for name, number in outcomes.most_common()])
    rows: list[list[Any]] = [
        ["keys", str(len(judged))],
        ["kills of the frontend", str(kills)],
        ["most beyond a limit a minute, in requests", f"{max(each.over for each in judged):.2f}"],
        ["most beyond requests at once", str(max(each.over_at_once for each in judged))],
        ["least use of a limit a minute", f"{min(each.use for each in judged if each.use):.0%}"],
    ]
    table("Limits", ["", ""], rows)
    told, recorded = sum(each.told for each in metered), sum(each.recorded for each in metered)
    rows = [
        ["tokens of whole answers, told to clients", str(told)],
        ["tokens recorded", str(recorded)],
        ["answers cut off by a kill", str(sum(each.cut_off for each in metered))],
        ["keys with less than told, or more than that and what was cut off", str(sum(not e.is_right for e in metered))],
    ]
    table("Usage", ["", ""], rows)
