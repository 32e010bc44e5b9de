"""The limits of keys as HTTP has them: refusals in OpenAI's shape, and headers that say how a key stands. Pure."""

from __future__ import annotations

import math

from dynamo_local.core.http.admission import Refusal
from dynamo_local.core.keys.limits import Taken

LIMITED = "rate_limit_exceeded"
"""The code of a refusal for a limit."""

AT_ONCE_RETRY_S = 1

NEVER = ((b"x-should-retry", b"false"),)
"""Tells OpenAI's clients not to try what can never be granted."""

Headers = tuple[tuple[bytes, bytes], ...]


def too_many_at_once(name: str, limit: int) -> Refusal:
    """Return the refusal of a request beyond those that a key may have in flight."""
    why = f"Rate limit reached for key {name} on requests at once: Limit {limit}, Requested 1."
    return Refusal(429, why, "requests", retry_after_s=AT_ONCE_RETRY_S, code=LIMITED)


def too_many_requests(name: str, limit: int, taken: Taken) -> Refusal:
    """Return the refusal of a request beyond those of a minute."""
    why = f"Rate limit reached for key {name} on requests per min: Limit {limit}. {_again(taken)}"
    return Refusal(429, why, "requests", retry_after_s=_seconds(taken), code=LIMITED)


def too_many_tokens(name: str, limit: int, asked: int, taken: Taken) -> Refusal:
    """Return the refusal of a request that asks for more tokens than are left of a minute's."""
    used = limit - taken.remaining
    why = f"Rate limit reached for key {name} on tokens per min: Limit {limit}, Used {used}, Requested {asked}."
    if taken.retry_s == math.inf:
        why = f"Request too large for key {name} on tokens per min: Limit {limit}, Requested {asked}."
        return Refusal(429, f"{why} Lower max_tokens, or shorten the prompt.", "tokens", code=LIMITED, headers=NEVER)
    return Refusal(429, f"{why} {_again(taken)}", "tokens", retry_after_s=_seconds(taken), code=LIMITED)


def headers_of(what: bytes, limit: int, taken: Taken) -> Headers:
    """Return the headers for one limit: `what` is "requests" or "tokens"."""
    return (
        (b"x-ratelimit-limit-" + what, b"%d" % limit),
        (b"x-ratelimit-remaining-" + what, b"%d" % taken.remaining),
        (b"x-ratelimit-reset-" + what, shown_time(taken.reset_s).encode()),
    )


def shown_time(seconds: float) -> str:
    """Return a time as OpenAI's headers have it: 0s, 120ms, 8.64s, 1m0s."""
    if seconds <= 0:
        return "0s"
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60:
        return f"{math.ceil(seconds * 100) / 100:g}s"
    return f"{math.ceil(seconds) // 60}m{math.ceil(seconds) % 60}s"


def _seconds(taken: Taken) -> int:
    return max(1, math.ceil(taken.retry_s))


def _again(taken: Taken) -> str:
    return f"Please try again in {shown_time(taken.retry_s)}."
