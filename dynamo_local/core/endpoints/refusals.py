"""Errors about endpoints on their way from the server to those who ordered, and back to errors there. Pure."""

from __future__ import annotations

from dynamo_local.core.errors import (
    DynamoError,
    EndpointAbsentError,
    EndpointConflictError,
    KeyAbsentError,
    KeyConflictError,
    SupervisorError,
    UsageError,
)
from dynamo_local.core.messages.endpoints import EndpointRefusal

_BAD_REQUEST, _NOT_FOUND, _CONFLICT, _UNAVAILABLE = 400, 404, 409, 503


def refusal_of(error: DynamoError) -> EndpointRefusal:
    """The refusal for an order that ended with this error. What is not the fault of the order is 503."""
    return EndpointRefusal(_status(error), error.cause, error.remedy or "")


def error_of(refusal: EndpointRefusal) -> DynamoError:
    """Inverse of `refusal_of`, as far as commands distinguish errors."""
    kinds: dict[int, type[DynamoError]] = {
        _BAD_REQUEST: UsageError,
        _NOT_FOUND: EndpointAbsentError,
        _CONFLICT: EndpointConflictError,
    }
    return kinds.get(refusal.status, SupervisorError)(refusal.cause, refusal.remedy or None)


def _status(error: DynamoError) -> int:
    if isinstance(error, EndpointAbsentError | KeyAbsentError):
        return _NOT_FOUND
    if isinstance(error, EndpointConflictError | KeyConflictError):
        return _CONFLICT
    return _BAD_REQUEST if isinstance(error, UsageError) else _UNAVAILABLE
