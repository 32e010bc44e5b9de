"""The limits of keys as HTTP has them: refusals in OpenAI's shape, and headers that say how a key stands. Pure."""

from __future__ import annotations

import math
from functools import lru_cache

from dynamo_local.core.http.bounds.admission import Refusal
from dynamo_local.core.keys.limits import Margin

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
