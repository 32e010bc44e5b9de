"""Sending the load. It paces, sends and writes down; what the times mean is told in figures.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dynamo_local.load.errors import ExchangeError
from dynamo_local.load.http.answers import AnswerReader, refusal
from dynamo_local.load.http.connection import Connections
from dynamo_local.load.http.endpoint import Asking, Endpoint
from dynamo_local.load.results.records import CUT_OFF, NOT_SENT, Record
from dynamo_local.load.workload.prompts import Prompts
from dynamo_local.load.workload.workload import Planned


@dataclass(frozen=True)
class LoadLimits:
    """What bounds the load itself."""

    max_in_flight: int
    timeout_s: float
    """For one request."""


@dataclass
class SendCounts:
    """Where the load stands, for those who watch it."""

    sent: int = 0
    completed: int = 0
    failed: int = 0
    tokens: int = 0

    @property
    def in_flight(self) -> int:
        return self.sent - self.completed - self.failed


class Writer:
    """Makes the bytes of requests."""

    def __init__(self, endpoint: Endpoint, asking: Asking, prompts: Prompts) -> None:
        self._endpoint, self._asking, self._prompts = endpoint, asking, prompts
        self._path, self._begin = asking.template()

    def write(self, index: int, planned: Planned) -> bytes:
        body = self._begin + self._prompts.write(index, planned) + self._asking.end(planned.output_tokens)
        return self._endpoint.request("POST", self._path, body)


class Generator:
    """Sends one load. Its records are there at any time, also after a cancellation."""

    def __init__(self, connections: Connections, writer: Writer, limits: LoadLimits) -> None:
        self._connections, self._writer, self._limits = connections, writer, limits
        self._begin = time.monotonic()
        self.records: list[Record] = []
        self.tally = SendCounts()

    @property
    def elapsed_s(self) -> float:
        """Since the start of the load."""
        return time.monotonic() - self._begin

    async def open_loop(self, requests: Iterable[Planned]) -> None:
        """Send each request at its time, whatever became of those before, and wait for all answers.

        With `max_in_flight` under way a request is not sent at all, and counts as failed: a request that waited here
        would hide from the figures that the server is too slow.
        """
        self._begin = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for index, planned in enumerate(requests):
                request = self._writer.write(index, planned)  # before its time: long prompts take a while to make
                # Also when it is late already: answers must be read meanwhile.
                await asyncio.sleep(max(0.0, planned.at_s - self.elapsed_s))
                record = self._record(planned)
                if self.tally.in_flight >= self._limits.max_in_flight:
                    record.error, record.detail = NOT_SENT, f"{self._limits.max_in_flight} were in flight"
                    continue
                group.create_task(self._send(request, record), name=f"request {index}")

    async def closed_loop(self, requests: Iterable[Planned], streams: int, duration_s: float | None) -> None:
        """Keep `streams` requests under way for `duration_s`, or until there are no more, and wait for all answers."""
        self._begin = time.monotonic()
        numbered = iter(enumerate(requests))
        async with asyncio.TaskGroup() as group:
            for index in range(streams):
                group.create_task(self._stream(numbered, duration_s), name=f"stream {index}")

    async def _stream(self, numbered: Iterator[tuple[int, Planned]], duration_s: float | None) -> None:
        for index, planned in numbered:
            if duration_s is not None and self.elapsed_s >= duration_s:
                return
            request = self._writer.write(index, planned)
            record = self._record(planned)
            record.at_s = self.elapsed_s
            await self._send(request, record)
            if record.error:
                await asyncio.sleep(0.1)  # a server that refuses at once is not to be stormed

    def _record(self, planned: Planned) -> Record:
        record = Record(planned.at_s, planned.input_tokens, planned.output_tokens)
        self.records.append(record)
        return record

    async def _send(self, request: bytes, record: Record) -> None:
        """One exchange. What goes wrong with it is written down."""
        reader = AnswerReader(record)
        last_s = record.sent_s = self.elapsed_s
        self.tally.sent += 1

        def take(part: bytes, now: float) -> None:
            nonlocal last_s
            last_s = now - self._begin
            reader.take(part, last_s)

        try:
            async with asyncio.timeout(self._limits.timeout_s):
                answer = await self._connections.exchange(request, take)
            if answer.status != 200:
                raise refusal(answer.status, answer.body)
            reader.end()
        except ExchangeError as error:
            record.error, record.detail = error.kind, error.cause
        except TimeoutError:
            record.error, record.detail = "timeout", f"no end within {self._limits.timeout_s:g} s"
        except asyncio.CancelledError:
            record.error, record.detail = CUT_OFF, "the load was interrupted"
            raise
        finally:
            self._settle(record, last_s)

    def _settle(self, record: Record, last_s: float) -> None:
        if record.error:
            record.ended_s = self.elapsed_s
            record.tokens = record.tokens or len(record.chunks_s)
            self.tally.failed += 1
        else:
            record.ended_s = last_s
            self.tally.completed += 1
        self.tally.tokens += record.tokens
