"""Sends a load to a server, and keeps its records: `Generator` paces and sends, `run` does all of `dynamo load`."""

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
from dynamo_local.load.client import SAFE_TOKENS, Asking, Client, Endpoint, find_model, find_tokens
from dynamo_local.load.connection import Connections
from dynamo_local.load.figures import NOT_SENT, Figures, Objective, Record, figures, notes
from dynamo_local.load.runs import Run
from dynamo_local.load.workload import WORDS, Alphabet, Planned, Prompts

# Sends a load: paces the requests, sends them, and keeps their records. figures.py evaluates the records.


@dataclass
class SendCounts:
    """Counts of requests so far, for the progress of a load."""

    sent: int = 0
    completed: int = 0
    failed: int = 0
    tokens: int = 0

    @property
    def in_flight(self) -> int:
        return self.sent - self.completed - self.failed


class PromptWriter(Protocol):
    """Writes the prompts of a load, as `prompts.Prompts` does."""

    def write(self, index: int, planned: Planned) -> bytes:
        """Write the prompt of the request with this index, as JSON: a string or an array of token ids."""
        ...


class Generator:
    """Sends one load. `records` may be read at any time, also after a cancellation."""

    def __init__(self, client: Client, prompts: PromptWriter, max_in_flight: int) -> None:
        """`max_in_flight` bounds an open loop only."""
        self._client, self._prompts, self._max_in_flight = client, prompts, max_in_flight
        self._begin = time.monotonic()
        self.records: list[Record] = []
        self.counts = SendCounts()

    @property
    def elapsed_s(self) -> float:
        """Time since the start of the load."""
        return time.monotonic() - self._begin

    async def open_loop(self, requests: Iterable[Planned]) -> None:
        """Send each request at its time, whether or not earlier ones have been answered, and wait for all answers.

        With `max_in_flight` requests in flight a further one is not sent, and counts as failed. If it waited here, the
        figures would hide that the server is too slow.
        """
        self._begin = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for index, planned in enumerate(requests):
                request = self._request(index, planned)  # before its time: long prompts take a while to make
                # Sleep also if the request is late already, so that answers are read meanwhile.
                await asyncio.sleep(max(0.0, planned.at_s - self.elapsed_s))
                record = self._record(planned)
                if self.counts.in_flight >= self._max_in_flight:
                    record.error, record.detail = NOT_SENT, f"{self._max_in_flight} were in flight"
                    continue
                group.create_task(self._send(request, record), name=f"request {index}")

    async def closed_loop(self, requests: Iterable[Planned], streams: int, duration_s: float | None) -> None:
        """Keep `streams` requests in flight for `duration_s`, or until there are no more, and wait for all answers."""
        self._begin = time.monotonic()
        numbered = iter(enumerate(requests))
        async with asyncio.TaskGroup() as group:
            for index in range(streams):
                group.create_task(self._stream(numbered, duration_s), name=f"stream {index}")

    async def _stream(self, numbered: Iterator[tuple[int, Planned]], duration_s: float | None) -> None:
        for index, planned in numbered:
            if duration_s is not None and self.elapsed_s >= duration_s:
                return
            request = self._request(index, planned)
            record = self._record(planned)
            record.at_s = self.elapsed_s
            await self._send(request, record)
            if record.error:
                await asyncio.sleep(0.1)  # a server that refuses at once is not to be stormed

    def _request(self, index: int, planned: Planned) -> bytes:
        return self._client.request(self._prompts.write(index, planned), planned.output_tokens)

    def _record(self, planned: Planned) -> Record:
        record = Record(planned.at_s, planned.input_tokens, planned.output_tokens)
        self.records.append(record)
        return record

    async def _send(self, request: bytes, record: Record) -> None:
        """Send a request, and count its result. A failure is in its record."""
        self.counts.sent += 1
        try:
            await self._client.send(request, record, self._begin)
        finally:
            if record.error:
                self.counts.failed += 1
            else:
                self.counts.completed += 1
            self.counts.tokens += record.tokens


# Runs a load: queries the server, sends the requests, and computes the figures.

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
