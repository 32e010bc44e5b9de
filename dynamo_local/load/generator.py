"""Sends a load: paces the requests, sends them, and keeps their records. results/figures.py evaluates the records."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from dynamo_local.load.client import Client
from dynamo_local.load.results.records import NOT_SENT, Record
from dynamo_local.load.workload.workload import Planned


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
