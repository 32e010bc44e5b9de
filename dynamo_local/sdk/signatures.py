"""Reads the types of requests and replies from an endpoint's annotations; both ends of a call convert to them."""

from __future__ import annotations

import collections.abc
from typing import Any, get_args, get_origin, get_type_hints

from dynamo_local.core.errors import GraphError
from dynamo_local.sdk.service import EndpointSpec

_STREAMS = (
    collections.abc.AsyncIterator,
    collections.abc.AsyncIterable,
    collections.abc.AsyncGenerator,
)


def request_type(cls: type, endpoint: EndpointSpec) -> Any:
    """Return the annotation of the endpoint's argument, or Any. Raises GraphError."""
    hints = _hints(cls, endpoint)
    hints.pop("return", None)
    return next(iter(hints.values()), Any)


def reply_type(cls: type, endpoint: EndpointSpec) -> Any:
    """Return the type of one reply, or Any if it is not annotated. Raises GraphError."""
    annotation = _hints(cls, endpoint).get("return", Any)
    if not endpoint.streams:
        return annotation
    arguments = get_args(annotation)
    return arguments[0] if get_origin(annotation) in _STREAMS and arguments else Any


def _hints(cls: type, endpoint: EndpointSpec) -> dict[str, Any]:
    try:
        return get_type_hints(getattr(cls, endpoint.method), include_extras=True)
    except NameError as error:
        raise GraphError(
            f"annotation of {cls.__name__}.{endpoint.method} cannot be evaluated: {error}",
            "import the type at run time, not under TYPE_CHECKING",
        ) from error
