"""A client of one model behind an OpenAI API, which measures the answers that it streams.

`dynamo load` sends its requests with it (generator.py); benchmarks and tests ask for one completion at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec

from dynamo_local.load.errors import ExchangeError
from dynamo_local.load.http.answers import AnswerReader, refusal
from dynamo_local.load.http.connection import Connections
from dynamo_local.load.http.endpoint import Asking, Endpoint
from dynamo_local.load.results.records import CUT_OFF, Completion, Record

TIMEOUT_S = 120.0


class Client:
    """Sends requests to the model over reused connections, one at a time on each. An async context manager."""

    def __init__(
        self,
        endpoint: Endpoint,
        asking: Asking,
        timeout_s: float = TIMEOUT_S,
        connections: Connections | None = None,
    ) -> None:
        """`timeout_s` bounds each request. `connections`: shared with other clients; None: the client's own. Raises
        UsageError for fields in `asking` that the client sets itself."""
        self._endpoint, self._asking, self._timeout_s = endpoint, asking, timeout_s
        self._connections = connections or endpoint.connections()
        self._path, self._begin = asking.template()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the free connections. A connection in use closes when its request is cancelled."""
        self._connections.close()

    def request(self, prompt: bytes, output_tokens: int) -> bytes:
        """Return the bytes of a request for a completion. `prompt`: as JSON, a string or an array of token ids."""
        body = self._begin + prompt + self._asking.end(output_tokens)
        return self._endpoint.request("POST", self._path, body)

    async def complete(
        self, prompt: str | Sequence[int], output_tokens: int, completion: Completion | None = None
    ) -> Completion:
        """Request a completion of a prompt (text, or token ids), and wait for its end.

        Times are those of `time.monotonic`. A failure is recorded in the completion and not raised; a cancellation is
        recorded and raised. Pass a `completion` to watch it while it arrives.
        """
        completion = completion or Completion()
        completion.output_tokens = output_tokens
        request = self.request(msgspec.json.encode(prompt), output_tokens)
        completion.at_s = time.monotonic()
        await self.send(request, completion)
        return completion

    async def send(self, request: bytes, record: Record, begin_s: float = 0.0) -> None:
        """Send a request and fill its record, whose times count from `begin_s` (`time.monotonic`). A failure is
        recorded and not raised; a cancellation is recorded and raised."""
        reader = AnswerReader(record)
        last_s = record.sent_s = time.monotonic() - begin_s

        def take(part: bytes, now: float) -> None:
            nonlocal last_s
            last_s = now - begin_s
            reader.take(part, last_s)

        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._connections.exchange(request, take)
            if answer.status != 200:
                raise refusal(answer.status, answer.body)
            reader.end()
        except ExchangeError as error:
            record.error, record.detail = error.kind, error.cause
        except TimeoutError:
            record.error, record.detail = "timeout", f"no end within {self._timeout_s:g} s"
        except asyncio.CancelledError:
            record.error, record.detail = CUT_OFF, "the request was cancelled"
            raise
        finally:
            if record.error:
                record.ended_s = time.monotonic() - begin_s
                record.tokens = record.tokens or len(record.chunks_s)
            else:
                record.ended_s = last_s
