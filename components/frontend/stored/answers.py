"""What requests about stored things have in common: errors as refusals, and pages of lists."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from components.frontend.http.answers import JSON, answer
from dynamo_local.core.errors import ConfigError, DynamoError, ItemAbsentError, StorageFullError
from dynamo_local.core.http.asgi import Scope, Send
from dynamo_local.core.http.bounds.admission import Refusal
from dynamo_local.core.http.bounds.limits import NEVER

_RETRY_S = 5

_T = TypeVar("_T")


def refusal_of(error: DynamoError) -> Refusal:
    """Return the refusal of a request that a store cannot carry out."""
    if isinstance(error, ItemAbsentError):
        return Refusal(404, error.cause, "NotFoundError", "id")
    if isinstance(error, ConfigError):
        return Refusal(400, str(error), "BadRequestError")
    if isinstance(error, StorageFullError):
        # Sent again, it would only grow the shortage.
        return Refusal(507, str(error), "InsufficientStorageError", headers=NEVER)
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
        return Refusal(507, f"the server's disk is full: {error.cause}", "InsufficientStorageError", headers=NEVER)
    return Refusal(503, str(error), "ServiceUnavailableError", retry_after_s=_RETRY_S)


async def answer_json(send: Send, content: Any) -> None:
    """Answer with status 200."""
    await answer(send, 200, msgspec.json.encode(content), [JSON])


def query_of(scope: Scope, known: frozenset[str]) -> dict[str, str]:
    """Return the parameters of a query. Raises ConfigError for others than the known ones."""
    asked = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True))
    if unknown := asked.keys() - known:
        raise ConfigError(f"there is no parameter {min(unknown)[:60]!r}")
    return asked


def page(
    items: Sequence[_T], asked: Mapping[str, str], id_of: Callable[[_T], str], shown: Callable[[_T], Any], most: int
) -> dict[str, Any]:
    """Return a page of a list as OpenAI's clients know it. `asked`: with `after`, the id before its first item, and
    `limit`; `most`: the limit at most, and if none is asked for. Raises ConfigError."""
    limit = asked.get("limit", str(most))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= most):
        raise ConfigError(f"limit must be a number from 1 to {most}, got {limit[:20]!r}")
    begin = 0
    if after := asked.get("after"):
        begin = next((index + 1 for index, item in enumerate(items) if id_of(item) == after), len(items))
    found = items[begin : begin + int(limit)]
    return {
        "object": "list",
        "data": [shown(item) for item in found],
        "first_id": id_of(found[0]) if found else None,
        "last_id": id_of(found[-1]) if found else None,
        "has_more": begin + len(found) < len(items),
    }
