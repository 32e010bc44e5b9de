"""The limits of keys: what is left of them, refusals in OpenAI's shape, and headers that say how a key stands. Pure."""

from __future__ import annotations

import math
from functools import lru_cache

import msgspec

from dynamo_local.core.http.bounds.admission import Refusal

# The limits of keys: so many a minute, at an even rate, with a minute's worth at once for who has waited. Pure.
#
# The generic cell rate algorithm: each key has, for each limit, one number, the time at which all that it has taken
# would be paid for at its rate. What would bring that time further ahead than a minute is refused. So in any t seconds
# a key gets at most its limit, and t / 60 of it more. Times are of one clock that never goes back, in seconds.

WINDOW_S = 60.0

_MOST_AHEAD_S = 3600.0
"""A time further ahead than that is no debt, but of another clock."""

_FULL_S = WINDOW_S * (1 + 1e-9)
"""How far ahead what is taken may bring the number. A billionth of a minute is the error of the arithmetic."""


class Margin(msgspec.Struct, frozen=True):
    """How a key stands with one of its limits. `remaining`: how many could be taken now. `reset_s`: until a whole
    minute's worth can be."""

    remaining: int
    reset_s: float


def take(paid_at: float, now: float, amount: int, per_minute: int, *, forced: bool = False) -> float | None:
    """Return the number to keep after an amount is taken; None: the limit does not allow it. `forced`: it is taken in
    any case, since it has been used already."""
    # `_sane` is written out, and called for what is rare: this is done for each request.
    before = paid_at if now < paid_at <= now + _MOST_AHEAD_S else _sane(paid_at, now)
    after = before + amount * WINDOW_S / per_minute
    return after if forced or after - now <= _FULL_S else None


def wait_s(paid_at: float, now: float, amount: int, per_minute: int) -> float:
    """Return the time until an amount can be taken; infinite: it never can be."""
    if amount > per_minute:
        return math.inf
    return max(0.0, _sane(paid_at, now) + amount * WINDOW_S / per_minute - now - WINDOW_S)


def margin_of(paid_at: float, now: float, per_minute: int) -> Margin:
    """What could be taken now."""
    ahead_s = paid_at - now
    if not 0.0 < ahead_s <= _MOST_AHEAD_S:
        ahead_s = 0.0 if ahead_s <= 0.0 else _sane(paid_at, now) - now
    remaining = int((WINDOW_S - ahead_s) * per_minute / WINDOW_S + 1e-6)
    return Margin(remaining if remaining > 0 else 0, ahead_s)


def give_back(paid_at: float, now: float, amount: int, per_minute: int, taken_until: float) -> float:
    """Return the number to keep after an amount is given back that was taken and not used. `taken_until`: the number
    right after it was taken. What the key's rate has paid for meanwhile is not given twice."""
    back_s = amount * WINDOW_S / per_minute
    if back_s > taken_until - now:
        back_s = taken_until - now
    return paid_at - back_s if back_s > 0.0 else paid_at


def _sane(paid_at: float, now: float) -> float:
    """The number as one that can be: not in the past, and no later than any debt reaches."""
    if not paid_at > now:
        return now
    return paid_at if paid_at <= now + _MOST_AHEAD_S else now + WINDOW_S


# As HTTP has them.

LIMITED = "rate_limit_exceeded"
"""The code of a refusal for a limit."""

AT_ONCE_RETRY_S = 1

NEVER = ((b"x-should-retry", b"false"),)
"""Tells OpenAI's clients not to try what can never be granted."""

_REMAINING_REQUESTS, _RESET_REQUESTS = b"x-ratelimit-remaining-requests", b"x-ratelimit-reset-requests"
_REMAINING_TOKENS, _RESET_TOKENS = b"x-ratelimit-remaining-tokens", b"x-ratelimit-reset-tokens"

Headers = tuple[tuple[bytes, bytes], ...]


def too_many_at_once(name: str, limit: int) -> Refusal:
    """Return the refusal of a request beyond those that a key may have in flight."""
    why = f"Rate limit reached for key {name} on requests at once: Limit {limit}, Requested 1."
    return Refusal(429, why, "requests", retry_after_s=AT_ONCE_RETRY_S, code=LIMITED)


def too_many_requests(name: str, limit: int, retry_s: float) -> Refusal:
    """Return the refusal of a request beyond those of a minute. `retry_s`: until it would be granted."""
    why = f"Rate limit reached for key {name} on requests per min: Limit {limit}. {_again(retry_s)}"
    return Refusal(429, why, "requests", retry_after_s=_seconds(retry_s), code=LIMITED)


def too_many_tokens(name: str, limit: int, asked: int, margin: Margin, retry_s: float) -> Refusal:
    """Return the refusal of a request that asks for more tokens than are left of a minute's."""
    if retry_s == math.inf:
        why = f"Request too large for key {name} on tokens per min: Limit {limit}, Requested {asked}."
        return Refusal(429, f"{why} Lower max_tokens, or shorten the prompt.", "tokens", code=LIMITED, headers=NEVER)
    used = limit - margin.remaining
    why = f"Rate limit reached for key {name} on tokens per min: Limit {limit}, Used {used}, Requested {asked}."
    return Refusal(429, f"{why} {_again(retry_s)}", "tokens", retry_after_s=_seconds(retry_s), code=LIMITED)


def request_headers(limit: int, margin: Margin) -> Headers:
    """Return the headers for the limit of requests."""
    reset = _written(_shown_ms(margin.reset_s))
    return _limit(b"requests", limit), (_REMAINING_REQUESTS, b"%d" % margin.remaining), (_RESET_REQUESTS, reset)


def token_headers(limit: int, margin: Margin) -> Headers:
    """Return the headers for the limit of tokens."""
    reset = _written(_shown_ms(margin.reset_s))
    return _limit(b"tokens", limit), (_REMAINING_TOKENS, b"%d" % margin.remaining), (_RESET_TOKENS, reset)


def shown_time(seconds: float) -> str:
    """Return a time as OpenAI's headers have it: 0s, 120ms, 8.64s, 1m0s."""
    return _written(_shown_ms(seconds)).decode()


def _shown_ms(seconds: float) -> int:
    """Round up, in milliseconds, to what is shown of a time."""
    if seconds < 1:
        return math.ceil(seconds * 1000)
    if seconds < 60:
        return 10 * math.ceil(seconds * 100)
    return 1000 * math.ceil(seconds)


# Both are called for each answer, and seldom with what is new: there are 7,000 times below a minute, and few limits.


@lru_cache(maxsize=8192)
def _written(ms: int) -> bytes:
    if ms <= 0:
        return b"0s"
    if ms < 1000:
        return b"%dms" % ms
    if ms < 60_000:
        return f"{ms / 1000:g}s".encode()
    return b"%dm%ds" % divmod(ms // 1000, 60)


@lru_cache(maxsize=1024)
def _limit(what: bytes, limit: int) -> tuple[bytes, bytes]:
    return b"x-ratelimit-limit-" + what, b"%d" % limit


def _seconds(retry_s: float) -> int:
    return max(1, math.ceil(retry_s))


def _again(retry_s: float) -> str:
    return f"Please try again in {shown_time(retry_s)}."
