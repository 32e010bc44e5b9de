"""Sends tokens to frontends, in messages no larger than the bus takes."""

from __future__ import annotations

import logging
from collections import Counter

from dynamo_local.core import codec
from dynamo_local.core.errors import BusError
from dynamo_local.core.messages.tokens import Fault, TokenBatch, TokenDelta
from dynamo_local.core.messages.work import RequestEpoch
from dynamo_local.process.context import ServiceContext

_log = logging.getLogger(__name__)


class TokenSender:
    """Publishes token batches, numbered for each frontend (`TokenBatch.seq`)."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._sequence: Counter[str] = Counter()

    async def send(self, frontend: str, deltas: tuple[TokenDelta, ...]) -> list[RequestEpoch]:
        """Publish deltas. Returns requests that were failed, because one delta of theirs is too large for the bus."""
        data = codec.encode(TokenBatch(self._context.lease, self._sequence[frontend] + 1, deltas))
        if len(data) > self._context.bus.max_payload:
            return await self._send_parts(frontend, deltas)
        self._sequence[frontend] += 1
        try:
            await self._context.bus.publish(self._context.subjects.tokens(frontend), data)
        except BusError as error:
            # Not sent again here: the frontend notices the missing positions, and asks for them.
            _log.warning("tokens for frontend %s could not be sent: %s", frontend, error)
        return []

    async def _send_parts(self, frontend: str, deltas: tuple[TokenDelta, ...]) -> list[RequestEpoch]:
        if len(deltas) > 1:
            middle = len(deltas) // 2
            too_large = await self.send(frontend, deltas[:middle])
            return too_large + await self.send(frontend, deltas[middle:])
        request = RequestEpoch(deltas[0].request_id, deltas[0].epoch)
        why = _too_large(deltas[0], self._context.bus.max_payload)
        await self.send(frontend, (error_delta(request, why, fault="request"),))
        return [request]

    def forget(self, frontend: str) -> None:
        """Drop the count of a frontend that is gone."""
        self._sequence.pop(frontend, None)


def _too_large(delta: TokenDelta, most: int) -> str:
    if delta.pooled is None:
        return "the log-probabilities asked for are more than can be sent"
    return f"the pooled output has {len(delta.pooled.data)} bytes, and at most {most} can be sent: shorten the input"


def error_delta(request: RequestEpoch, why: str, *, refused: bool = False, fault: Fault | None = None) -> TokenDelta:
    """A delta that ends an epoch with an error. For `refused` and `fault` see `TokenDelta`."""
    return TokenDelta(request.request_id, request.epoch, 0, [], finish="error", error=why, refused=refused, fault=fault)
