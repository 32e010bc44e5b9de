"""What one request has taken of its key's limits: counted when it comes, corrected when it ends.

Tokens are taken when vLLM's application has examined the request and submits it: what it submits is refused then, and
whatever the application answers to that becomes the refusal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from components.frontend.http.answers import refuse
from components.frontend.keys.counters import Counters
from dynamo_local.core.http.admission import Demand, Refusal
from dynamo_local.core.http.asgi import Event, Send
from dynamo_local.core.http.limits import (
    Headers,
    headers_of,
    too_many_at_once,
    too_many_requests,
    too_many_tokens,
)
from dynamo_local.core.keys.values import ApiKey
from dynamo_local.core.ports import Request


@dataclass(frozen=True)
class Gatekeeper:
    """Gives tickets to the requests of keys."""

    counters: Counters
    clock: Callable[[], float] = time.monotonic

    def admit(self, key: ApiKey) -> Ticket:
        """Return the ticket of a request that has come just now. It may be refused already."""
        return Ticket(key, self.counters, self.clock)


class Ticket:
    """What one request has taken. `refusal`: why it is not answered; None: it is, as far as is known.

    `choices`: how many answers it asks for; `bounded`: whether it says how long they may become. Both are set when its
    body is known.
    """

    def __init__(self, key: ApiKey, counters: Counters, clock: Callable[[], float]) -> None:
        self.choices = 1
        self.bounded = False
        self.refusal: Refusal | None = None
        self._key = key
        self._counters = counters
        self._clock = clock
        self._charged = 0
        self._taken_until = 0.0
        self._prompt: object = None
        admitted = counters.admit(key, clock())
        self._requests, self._tokens = admitted.requests, admitted.tokens
        self._is_counted = admitted.is_free and (admitted.requests is None or admitted.requests.retry_s == 0.0)
        if not admitted.is_free:
            self.refusal = too_many_at_once(key.name, key.requests_at_once or 0)
        elif admitted.requests is not None and not admitted.requests.granted:
            self.refusal = too_many_requests(key.name, key.requests_per_minute or 0, admitted.requests)

    def end(self, used: int) -> None:
        """Take the request as ended, which has used so many tokens. To be called once."""
        if self._is_counted:
            unused = self._charged - (used if self.refusal is None else 0)
            self._counters.leave(self._key, unused, self._taken_until, self._clock())

    def charge(self, request: Request) -> str | None:
        """Take the tokens that a submission may use. Returns why that is refused.

        The first submission decides, with the output of all choices; what others have besides is taken in any case. An
        output without a bound is taken when it is known.
        """
        limit = self._key.tokens_per_minute
        if self.refusal is not None:
            return self.refusal.message
        if limit is None:
            return None
        first = self._prompt is None
        output = (request.max_tokens or 0) if self.bounded else 0
        amount = output * (self.choices if first else 0)
        if first or request.prompt_token_ids != self._prompt:
            amount += len(request.prompt_token_ids)
        self._prompt = request.prompt_token_ids
        taken = self._counters.take_tokens(self._key, limit, amount, self._clock(), forced=not first)
        self._tokens = taken
        if not taken.granted:
            self.refusal = too_many_tokens(self._key.name, limit, amount, taken)
            return self.refusal.message
        self._charged += amount
        self._taken_until = taken.paid_at
        return None

    def sending(self, send: Send) -> Send:
        """Return an ASGI `send` for the answer: with how the key stands with its limits, or with the refusal in place
        of what the application makes of it."""
        begun = False

        async def send_on(event: Event) -> None:
            nonlocal begun
            if event["type"] != "http.response.start":
                if begun:
                    await send(event)
            elif self.refusal is None or event["status"] == 429:
                begun = True
                await send({**event, "headers": [*event["headers"], *self._headers()]})
            else:
                # The rest of what the application answers is not sent.
                await refuse(send_on, self.refusal)
                begun = False

        return send_on

    def _headers(self) -> Headers:
        key = self._key
        found: Headers = ()
        if key.requests_per_minute is not None and self._requests is not None:
            found += headers_of(b"requests", key.requests_per_minute, self._requests)
        if key.tokens_per_minute is not None and self._tokens is not None:
            found += headers_of(b"tokens", key.tokens_per_minute, self._tokens)
        return found


_BOUNDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""Fields that say how long an answer may become."""

_current: ContextVar[Ticket | None] = ContextVar("ticket of this request", default=None)


def charge_to(ticket: Ticket | None) -> None:
    """Charge what is submitted from here on, in this context, to the ticket; None: to nobody."""
    _current.set(ticket)


def note_demand(fields: Mapping[str, Any], demand: Demand) -> None:
    """Note in the ticket of this context, if there is one, what its request asks for."""
    if (ticket := _current.get()) is not None:
        ticket.choices = demand.sequences
        ticket.bounded = any(fields.get(name) is not None for name in _BOUNDS)


def current_ticket() -> Ticket | None:
    """Return the ticket of the request in whose context this is called; None: it has no limits."""
    return _current.get()
