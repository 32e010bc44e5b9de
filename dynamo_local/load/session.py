"""Runs a load: queries the server, sends the requests, and computes the figures."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from dynamo_local.core.errors import UsageError
from dynamo_local.load.client import Client
from dynamo_local.load.generator import Generator, SendCounts
from dynamo_local.load.http.connection import Connections
from dynamo_local.load.http.endpoint import SAFE_TOKENS, Asking, Endpoint, find_model, find_tokens
from dynamo_local.load.results.figures import Figures, figures
from dynamo_local.load.results.file import Run
from dynamo_local.load.results.notes import notes
from dynamo_local.load.results.objectives import Objective
from dynamo_local.load.workload.prompts import WORDS, Alphabet, Prompts
from dynamo_local.load.workload.workload import Planned

_WATCH_S = 0.5
_SPARE_FILES = 64
"""Number of open files beside connections."""


@dataclass(frozen=True)
class Load:
    """The requests to send. `streams`: number of streams of a closed loop; None for an open loop."""

    requests: Iterable[Planned]
    duration_s: float | None
    """Time for which requests are sent; None: until the last one."""
    longest: int
    """Maximum length of a request: prompt and answer, in tokens."""
    streams: int | None = None


@dataclass(frozen=True)
class LoadLimits:
    """Limits of a load."""

    max_in_flight: int
    timeout_s: float
    """Time limit of a request, in seconds."""


@dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    endpoint: Endpoint
    model: str | None
    """Model to request; None: the first that the server lists."""
    load: Load
    limits: LoadLimits
    seed: int
    is_chat: bool = False
    is_text: bool = False
    vocabulary: range | None = None
    ignore_eos: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    warmup_s: float = 0.0
    objective: Objective | None = None
    told: dict[str, Any] = field(default_factory=dict)
    """The options as the user wrote them, for the file of the run."""


class Watcher(Protocol):
    """Receives notes and progress of a run."""

    def say(self, text: str) -> None:
        """Show a note to the user."""
        ...

    def progress(self, elapsed_s: float, counts: SendCounts) -> None:
        """Show the progress; called twice a second."""
        ...


async def run(settings: Settings, watcher: Watcher) -> Run:
    """Send the load and compute its figures. The first SIGINT or SIGTERM ends it early, with the figures of what there
    is. Raises LoadError if the server cannot be loaded at all."""
    _allow_files(settings.limits.max_in_flight + _SPARE_FILES)
    connections = settings.endpoint.connections()
    try:
        model, context = await find_model(connections, settings.endpoint, settings.model)
        if context is not None and settings.load.longest > context:
            watcher.say(
                f"the longest request needs {settings.load.longest} tokens, the model takes {context}: the server will "
                "refuse such; shorten with --input, --output, --max-input, --max-output"
            )
        asking = Asking(model, settings.is_chat, settings.ignore_eos, settings.extra)
        prompts = Prompts(await _alphabet(settings, connections, model, watcher), settings.seed)
        client = Client(settings.endpoint, asking, settings.limits.timeout_s, connections)
        generator = Generator(client, prompts, settings.limits.max_in_flight)
        cpu_s = time.process_time()
        interrupted = await _watched(generator, settings.load, watcher)
        cpu_share = (time.process_time() - cpu_s) / max(generator.elapsed_s, 1e-9)
    finally:
        connections.close()
    return _result(settings, model, generator, interrupted, cpu_share)


async def _alphabet(settings: Settings, connections: Connections, model: str, watcher: Watcher) -> Alphabet:
    letters: Sequence[int] | Sequence[str] | None
    if settings.is_text or settings.is_chat:
        letters = WORDS
    elif settings.vocabulary is not None:
        letters = settings.vocabulary
    else:
        letters = await find_tokens(connections, settings.endpoint, model)
    if letters is None:
        letters = SAFE_TOKENS
        watcher.say(
            f"the server does not tell of its tokens; taking {SAFE_TOKENS[0]} to {SAFE_TOKENS[-1]} (others: --vocab, "
            "or --text)"
        )
    return Alphabet(letters, settings.seed)


async def _watched(generator: Generator, load: Load, watcher: Watcher) -> bool:
    """Send the load. Returns whether it was interrupted."""
    sending = asyncio.create_task(_sent(generator, load), name="load")
    watching = asyncio.create_task(_watch(generator, watcher), name="progress")
    loop = asyncio.get_running_loop()
    with _interrupting(loop, sending.cancel):
        try:
            await sending
        except asyncio.CancelledError:
            return True
        finally:
            watching.cancel()
            # An interrupted load ends with a cancellation, which is no error.
            with contextlib.suppress(asyncio.CancelledError):
                await watching
    return False


@contextlib.contextmanager
def _interrupting(loop: asyncio.AbstractEventLoop, interrupt: Callable[[], object]) -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, interrupt)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _sent(generator: Generator, load: Load) -> None:
    if load.streams is None:
        await generator.open_loop(load.requests)
    else:
        await generator.closed_loop(load.requests, load.streams, load.duration_s)


async def _watch(generator: Generator, watcher: Watcher) -> None:
    while True:
        await asyncio.sleep(_WATCH_S)
        watcher.progress(generator.elapsed_s, generator.counts)


def _result(settings: Settings, model: str, generator: Generator, interrupted: bool, cpu_share: float) -> Run:
    records = generator.records
    is_closed = settings.load.streams is not None
    found = figures(records, settings.warmup_s, _sending_s(settings.load, generator, interrupted), settings.objective)
    counted = [record for record in records if record.at_s >= settings.warmup_s]
    return Run(
        settings={**settings.told, "model": model, "url": settings.endpoint.url},
        figures=_without_offer(found) if is_closed else found,
        notes=notes(found, counted, cpu_share, is_closed=is_closed),
        warmup_s=settings.warmup_s,
        interrupted=interrupted,
        client_cpu_share=cpu_share,
        requests=records,
    )


def _sending_s(load: Load, generator: Generator, interrupted: bool) -> float:
    """Return the time for which requests were sent, in seconds."""
    if load.duration_s is None:
        return generator.records[-1].at_s if generator.records else 0.0
    return min(load.duration_s, generator.elapsed_s) if interrupted else load.duration_s


def _without_offer(found: Figures) -> Figures:
    """Remove the offered rate, which a closed loop does not have: its requests wait for answers."""
    return msgspec.structs.replace(found, arrivals_s=0.0, offered_per_s=0.0, lag_s=None)


def _allow_files(count: int) -> None:
    """Raise the limit of open files to `count`. Raises UsageError if the system does not allow that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise UsageError(
            f"{count} open files are needed, the system allows {hard}", "lower --max-in-flight or raise `ulimit -n`"
        )
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
