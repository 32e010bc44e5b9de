"""What clients notice when a worker is killed: its streams until their next token, new requests until their first.

Two workers with real vLLM behind a router. In each round streams are spread over both, one worker gets SIGKILL, and
new requests go on arriving. Which stream was on which worker is read off the bus. The answers are compared with
those of the same prompts without a kill: greedy, so they must be equal, token for token.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.client import Answer, Connection
from benchmarks.load import prompt
from benchmarks.models import QUICKSTART, model_folder
from benchmarks.presences import PresenceLog
from benchmarks.report import Figures, progress, table
from benchmarks.servers import Server, add_override, parse_overrides, running, start_ours
from benchmarks.spread import quantile
from dynamo_local.core.messages import Presence, TokenBatch

SUMMARY = "a worker is killed: time to the next token of its streams, and to the first of new requests"
WORKERS = 2
_STREAMS = 8
_STREAM_TOKENS = 3000
"""Enough to be under way for longer than a kill and its recovery take."""
_ARRIVALS_PER_S = 4.0
_ARRIVING_S = 6.0
_ARRIVAL_TOKENS = 8
_BEFORE_KILL_S = 2.0
_SHARES = (0.5, 0.9, 1.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help="kills (5)")
    parser.add_argument("--streams", type=int, default=_STREAMS, help="streams under way at each kill")
    add_override(parser)


@dataclass
class Stream:
    """One long answer, watched while it comes."""

    prompt: str
    answer: Answer = field(default_factory=lambda: Answer(0.0))

    def recovery_s(self, killed_at: float) -> float | None:
        """From the kill to the end of the longest silence that followed; None if no token came any more.

        Not simply to the next token: some are on their way already when their worker dies.
        """
        later = [(b - a, b) for a, b in zip(self.answer.times, self.answer.times[1:], strict=False) if b >= killed_at]
        return max(later)[1] - killed_at if later else None


@dataclass
class Round:
    """One kill."""

    killed_at: float
    victims: list[Stream]
    bystanders: list[Stream]
    arrivals: list[Answer]
    arrivals_before: list[Answer]


async def run(arguments: argparse.Namespace) -> Figures:
    """Measure, print, and return the figures."""
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    draw = random.Random(0)
    prompts = [prompt(draw, 12) for _ in range(arguments.streams)]
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        server = start_ours(
            Path(scratch), str(model_folder(QUICKSTART)), "agg_router", parse_overrides(arguments.override)
        )
        async with running(server), PresenceLog(server) as log:
            progress("waiting for two workers")
            await server.ready()
            workers = await _all_ready(log, frozenset())
            progress("the answers without a kill")
            expected = await _undisturbed(server, prompts)
            results, dead = [], frozenset[str]()
            for number in range(rounds):
                victim = workers[number % WORKERS]
                results.append(await _kill_one(server, log, prompts, victim))
                progress(f"round {number + 1}: {_told(results[-1])}")
                dead |= {victim.lease}
                workers = await _all_ready(log, dead)
    return _report(results, dict(zip(prompts, expected, strict=True)))


async def _all_ready(log: PresenceLog, dead: frozenset[str]) -> list[Presence]:
    """The workers, once all are ready, by watcher."""
    found: dict[str, Presence] = {}
    while len(found) < WORKERS:
        presence = await log.ready_worker(dead | found.keys())
        found[presence.lease] = presence
    return sorted(found.values(), key=lambda presence: presence.watcher)


async def _undisturbed(server: Server, prompts: Sequence[str]) -> list[str]:
    streams = [Stream(each) for each in prompts]
    await asyncio.gather(*(_follow(server, stream) for stream in streams))
    return [stream.answer.text() for stream in streams]


async def _kill_one(server: Server, log: PresenceLog, prompts: Sequence[str], victim: Presence) -> Round:
    placed: dict[str, str] = {}

    def note(batch: TokenBatch) -> None:
        placed.update((delta.request_id, batch.worker) for delta in batch.deltas)

    watching = await log.watch_tokens(note)
    streams = [Stream(each) for each in prompts]
    following = asyncio.gather(*(_follow(server, stream) for stream in streams))
    before = await _arrive(server, _BEFORE_KILL_S)
    await watching.unsubscribe()
    under_way = [stream for stream in streams if not stream.answer.ended_at]
    killed_at = time.perf_counter()
    os.kill(victim.pid, signal.SIGKILL)
    arrivals = await _arrive(server, _ARRIVING_S)
    await following
    victims = [stream for stream in under_way if _worker_of(stream, placed) == victim.lease]
    bystanders = [stream for stream in under_way if stream not in victims]
    return Round(killed_at, victims, bystanders, arrivals, before)


def _worker_of(stream: Stream, placed: dict[str, str]) -> str | None:
    """The internal id of a request starts with the one that its client sees."""
    shown = stream.answer.request_id
    return next((worker for request_id, worker in placed.items() if shown and request_id.startswith(shown)), None)


async def _follow(server: Server, stream: Stream) -> None:
    async with Connection(server.host, server.port, server.model, keep_events=True) as connection:
        await connection.complete(stream.prompt, _STREAM_TOKENS, stream.answer)


async def _arrive(server: Server, seconds: float) -> list[Answer]:
    """Short requests at a steady rate, whether or not the earlier ones were answered."""
    draw = random.Random(time.perf_counter())

    async def ask() -> Answer:
        async with Connection(server.host, server.port, server.model) as connection:
            return await connection.complete(prompt(draw, 12), _ARRIVAL_TOKENS)

    asked = []
    for _ in range(round(seconds * _ARRIVALS_PER_S)):
        asked.append(asyncio.create_task(ask()))
        await asyncio.sleep(1 / _ARRIVALS_PER_S)
    return list(await asyncio.gather(*asked))


def _told(result: Round) -> str:
    recovered = [s for s in result.victims if not s.answer.error]
    late = max((s.recovery_s(result.killed_at) or 0.0 for s in recovered), default=None)
    slowest = "" if late is None else f", the slowest after {late:.2f} s"
    refused = sum(bool(answer.error) for answer in result.arrivals)
    return (
        f"{len(recovered)} of {len(result.victims)} streams went on{slowest}; "
        f"{refused} of {len(result.arrivals)} new requests failed"
    )


def _report(rounds: Sequence[Round], expected: dict[str, str]) -> Figures:
    victims = [stream for each in rounds for stream in each.victims]
    bystanders = [stream for each in rounds for stream in each.bystanders]
    recovered = [
        after
        for each in rounds
        for stream in each.victims
        if not stream.answer.error and (after := stream.recovery_s(each.killed_at)) is not None
    ]
    figures: Figures = {
        "kills": len(rounds),
        "streams_of_killed_workers": _fates(victims, expected),
        "other_streams": _fates(bystanders, expected),
        "recovery_s": recovered,
        "ttft_before_s": _ttfts(answer for each in rounds for answer in each.arrivals_before),
        "ttft_after_s": _ttfts(answer for each in rounds for answer in each.arrivals),
        "arrivals": sum(len(each.arrivals) for each in rounds),
        "arrivals_failed": Counter(a.error for each in rounds for a in each.arrivals if a.error),
    }
    headers = ("", "number", *(f"p{100 * share:.0f} s" for share in _SHARES))
    rows = [
        _row("next token of the killed worker's streams", recovered),
        _row("first token of requests before the kill", figures["ttft_before_s"]),
        _row(f"first token of requests in the {_ARRIVING_S:g} s after it", figures["ttft_after_s"]),
    ]
    table(f"{len(rounds)} kills", headers, rows)
    for name in ("streams_of_killed_workers", "other_streams", "arrivals_failed"):
        print(f"{name.replace('_', ' ')}: {dict(figures[name])}")
    return figures


def _fates(streams: Sequence[Stream], expected: dict[str, str]) -> Figures:
    whole = [stream for stream in streams if not stream.answer.error]
    return {
        "all": len(streams),
        "complete": len(whole),
        "equal_to_undisturbed": sum(stream.answer.text() == expected[stream.prompt] for stream in whole),
        "errors": dict(Counter(stream.answer.error for stream in streams if stream.answer.error)),
    }


def _ttfts(answers: Iterable[Answer]) -> list[float]:
    return [answer.ttft_s for answer in answers if answer.times and not answer.error]


def _row(name: str, values: Sequence[float]) -> list[str]:
    shown = [f"{quantile(values, share):.3f}" if values else "-" for share in _SHARES]
    return [name, str(len(values)), *shown]
