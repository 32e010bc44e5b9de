"""Runs a file of requests against an API, and appends each result to another file."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from dynamo_local.core.errors import DynamoError, UsageError
from dynamo_local.core.http.bounds.admission import HEADER
from dynamo_local.core.stored.batches import BATCH_ENDPOINTS, BATCH_PRIORITY
from dynamo_local.core.stored.lines import Line, LineRefusedError, answered_line, read_line
from dynamo_local.load.client import Endpoint
from dynamo_local.load.connection import Connections, ExchangeError, LoadError
from state.files import system_errors
from state.stored.results import ResultFile

_TIMEOUT_S = 3600.0
_TRIES = 12
_BACKOFF_S, _MOST_BACKOFF_S = 0.25, 30.0
_AGAIN = frozenset({408, 429, 500, 502, 503, 504})


class BatchFile:
    """A file of requests and the file of their results. `total`: requests; `done`: those with a result."""

    def __init__(self, requests: Path, output: Path) -> None:
        """Check all requests, and read which have results. Raises UsageError, DiskError."""
        self._requests = requests
        ids = _checked(requests)
        self._results = ResultFile(output)
        self._found = {each.custom_id for each in self._results.open()}
        self.total = len(ids)
        self.done = len(ids & self._found)
        self.failed = 0
        """Requests of this run that were answered with an error."""
        self._before = self.done

    async def run(self, endpoint: Endpoint, concurrency: int, advance: Callable[[], None]) -> None:
        """Run the requests without a result. `advance` is called for each result. Raises LoadError, DiskError."""
        connections = endpoint.connections()
        room = asyncio.Semaphore(concurrency)
        try:
            async with asyncio.TaskGroup() as group:
                for line in _lines(self._requests):
                    if line.custom_id in self._found:
                        continue
                    await room.acquire()
                    task = group.create_task(self._run(line, endpoint, connections, advance))
                    task.add_done_callback(lambda _: room.release())
        except* DynamoError as errors:
            raise errors.exceptions[0] from None
        finally:
            connections.close()

    def summary(self, *, as_json: bool) -> str:
        """Return how many requests there were, and what became of them."""
        if as_json:
            numbers = {"total": self.total, "done_before": self._before, "failed": self.failed}
            return msgspec.json.encode(numbers).decode()
        before = f", {self._before} of them before" if self._before else ""
        return f"{self.done} of {self.total} requests have a result{before}; {self.failed} failed"

    def close(self) -> None:
        """Close the file of results."""
        self._results.close()

    async def _run(self, line: Line, endpoint: Endpoint, connections: Connections, advance: Callable[[], None]) -> None:
        status, body = await _ask(line, endpoint, connections)
        # Written in the loop: nothing else is to be answered here.
        self._results.append([answered_line(f"batch_req_{secrets.token_hex(12)}", line.custom_id, status, body)])
        self.done += 1
        self.failed += status >= 400
        advance()


async def _ask(line: Line, endpoint: Endpoint, connections: Connections) -> tuple[int, bytes]:
    """Return status and body of the answer. Raises LoadError if the API does not answer for long."""
    request = endpoint.request("POST", line.url, line.body, (f"{HEADER}: {BATCH_PRIORITY}",))
    why = ""
    for number in range(_TRIES):
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                answer = await connections.exchange(request, lambda part, now, parts=parts: parts.append(part))  # type: ignore[misc]
        except ExchangeError as error:
            why = str(error)
        except TimeoutError:
            why = f"no answer within {_TIMEOUT_S:g} s"
        else:
            body = b"".join(parts) or answer.body
            if answer.status not in _AGAIN:
                return answer.status, body
            why = f"status {answer.status}"
            if answer.status == 500 and number == 2:
                return answer.status, body
        await asyncio.sleep(min(_MOST_BACKOFF_S, _BACKOFF_S * 2**number))
    raise LoadError(f"line {line.number} is not answered: {why}", "the same command goes on when the server answers")


def _checked(path: Path) -> set[str]:
    """Check all requests; returns their ids. Raises UsageError."""
    seen: dict[str, int] = {}
    for line in _lines(path):
        if line.url not in BATCH_ENDPOINTS:
            raise UsageError(f"line {line.number}: url must be one of {', '.join(BATCH_ENDPOINTS)}")
        if (first := seen.setdefault(line.custom_id, line.number)) != line.number:
            raise UsageError(f"line {line.number}: custom_id is that of line {first}", "each request has its own")
    if not seen:
        raise UsageError(f"{path} has no requests", "write a JSON object in each line")
    return set(seen)


def _lines(path: Path) -> Iterator[Line]:
    with system_errors(f"cannot read {path}"), path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if text.isspace():
                continue
            try:
                yield read_line(number, text)
            except LineRefusedError as error:
                raise UsageError(error.error.message) from error
