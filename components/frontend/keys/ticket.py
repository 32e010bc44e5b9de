"""What one request has taken of its key's limits: counted when it comes, corrected when it ends.

Tokens are taken when vLLM's application has examined the request and submits it: what it submits is refused then, and
whatever the application answers to that becomes the refusal.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from components.frontend.http.outgoing import refuse
from components.frontend.limits.places import Counters, Denial
from dynamo_local.core.http.asgi import Event, Send
from dynamo_local.core.http.bounds.admission import Demand, Refusal
from dynamo_local.core.http.bounds.limits import (
    Headers,
    margin_of,
    request_headers,
    token_headers,
    too_many_at_once,
    too_many_requests,
    too_many_tokens,
    wait_s,
)
from dynamo_local.core.keys.values import ApiKey
from dynamo_local.core.ports import Request


class Ticket:
    """What one request has taken. `refusal`: why it is not answered; None: it is, as far as is known.

    `choices`: how many answers it asks for; `bounded`: whether it says how long they may become. Both are set when its
    body is known. `has_ended`: it charges nothing any more.
    """

    # What is so for most requests stands here, once for all of them.
    choices = 1
    bounded = False
    refusal: Refusal | None = None
    has_ended = False
    _is_counted = True
    _charged = 0
    _taken_until = 0.0
    _prompt: object = None
    _has_begun = False
    _send: Send

    def __init__(self, counters: Counters, clock: Callable[[], float], key: ApiKey) -> None:
        """Of a request of that key that has come just now. It may be refused already."""
        self._key = key
        self._counters = counters
        self._clock = clock
        denial = counters.admit(key, now := clock())
        if denial is not None:
            self._is_counted = False
            self.refusal = self._refusal_for(denial, now)

    def end(self, used: int) -> None:
        """Take the request as ended, which has used so many tokens. To be called once."""
        self.has_ended = True
        if self._is_counted:
            unused = self._charged - (used if self.refusal is None else 0)
            self._counters.leave(self._key, unused, self._taken_until, self._clock())

    def give_back_request(self) -> None:
        """Have the request not count as one of its minute: what it asks for is not there."""
        self._counters.give_back_request(self._key, self._clock())

    def note_demand(self, fields: Mapping[str, Any], demand: Demand) -> None:
        """Note what the request asks for."""
        self.choices = demand.sequences
        self.bounded = (
            fields.get("max_tokens") is not None
            or fields.get("max_completion_tokens") is not None
            or fields.get("max_output_tokens") is not None
        )

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
        before, prompt = self._prompt, request.prompt_token_ids
        amount, first = len(prompt), before is None
        if not first:
            amount = 0 if prompt == before else amount
        elif self.bounded:
            amount += (request.max_tokens or 0) * self.choices
        self._prompt = prompt
        now = self._clock()
        paid_at = self._counters.take_tokens(self._key, limit, amount, now, forced=not first)
        if paid_at is None:
            self.refusal = self._too_many(limit, amount, now)
            return self.refusal.message
        self._charged += amount
        self._taken_until = paid_at
        return None

    def _refusal_for(self, denial: Denial, now: float) -> Refusal:
        key = self._key
        if denial is Denial.AT_ONCE:
            return too_many_at_once(key.name, key.requests_at_once or 0)
        limit = key.requests_per_minute or 0
        return too_many_requests(key.name, limit, wait_s(self._counters.paid_at(key)[0], now, 1, limit))

    def _too_many(self, limit: int, amount: int, now: float) -> Refusal:
        paid_at = self._counters.paid_at(self._key)[1]
        margin, retry_s = margin_of(paid_at, now, limit), wait_s(paid_at, now, amount, limit)
        return too_many_tokens(self._key.name, limit, amount, margin, retry_s)

    def sending(self, send: Send) -> Send:
        """Return an ASGI `send` for the answer: with how the key stands with its limits, or with the refusal in place
        of what the application makes of it. To be called once."""
        self._send = send
        return self._send_on

    def _send_on(self, event: Event) -> Awaitable[None]:
        if event["type"] != "http.response.start":
            return self._send(event) if self._has_begun else _dropped()
        if self.refusal is None or event["status"] == 429:
            self._has_begun = True
            return self._send({**event, "headers": [*event["headers"], *self._headers()]})
        return self._refuse_instead(self.refusal)

    async def _refuse_instead(self, refusal: Refusal) -> None:
        await refuse(self._send_on, refusal)
        # The rest of what the application answers is not sent.
        self._has_begun = False

    def _headers(self) -> Headers:
        key, now = self._key, self._clock()
        requests, tokens = key.requests_per_minute, key.tokens_per_minute
        requests_at, tokens_at = self._counters.paid_at(key)
        told = () if requests is None else request_headers(requests, margin_of(requests_at, now, requests))
        return told if tokens is None else told + token_headers(tokens, margin_of(tokens_at, now, tokens))


async def _dropped() -> None:
    """Send nothing."""
