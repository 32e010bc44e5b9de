"""Errors on their way from the server to those who have asked, and back to errors there, which is pure; and why a
server, or one of its files, is not there."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from dynamo_local import __version__
from dynamo_local.core.errors import (
    DynamoError,
    EndpointAbsentError,
    EndpointConflictError,
    ItemAbsentError,
    KeyAbsentError,
    KeyConflictError,
    NotRunningError,
    OrderAbsentError,
    OrderError,
    OrderTooLargeError,
    SupervisorError,
    UnansweredError,
    UsageError,
)
from dynamo_local.core.server_choice import START_REMEDY
from state.namespaces import Found
from state.paths import StatePaths
from state.record import read_record

BAD_REQUEST, NOT_FOUND, CONFLICT, TOO_LARGE, UNAVAILABLE = 400, 404, 409, 413, 503
KINDS: Mapping[int, str] = MappingProxyType(
    {
        BAD_REQUEST: "BadRequestError",
        NOT_FOUND: "NotFoundError",
        CONFLICT: "ConflictError",
        TOO_LARGE: "BadRequestError",
        UNAVAILABLE: "ServiceUnavailableError",
    }
)
UNANSWERED = "UnansweredError"
"""Type of the answer of a server that starts or stops, and does not take the order: that is no refusal."""
_WAIT = "`dynamo wait` waits until it is ready"
RETRY_S = 2
"""In how many seconds it is worth asking again, after 503."""


class ErrorBody(msgspec.Struct, frozen=True):
    """An error as answers have it, in OpenAI's shape. `message` is cause and remedy together."""

    message: str
    type: str
    code: int
    cause: str
    remedy: str | None = None
    param: str | None = None


class _Answer(msgspec.Struct, frozen=True):
    error: ErrorBody


def only_starting(namespace: str) -> UnansweredError:
    """The error for what a server does only once all of it has been ready."""
    return UnansweredError(f"the server in namespace {namespace} is only starting", _WAIT)


def still_starting() -> UnansweredError:
    """The same, said by the server itself."""
    return UnansweredError("the server is only starting", _WAIT)


def absent_server(namespace: str, found: Found) -> NotRunningError:
    """The error for a namespace in which no server runs. `found`: the servers of the same state root. Pure."""
    cause = f"no server runs in namespace {namespace}"
    if namespace in found.crashed:
        return NotRunningError(
            f"{cause} (one that crashed left files)", f"`dynamo stop --namespace {namespace}` removes them"
        )
    running = f"servers run in: {', '.join(found.running)}"
    return NotRunningError(cause, running if found.running else START_REMEDY)


def why_absent(paths: StatePaths) -> UnansweredError:
    """The error for a file that is missing from the run directory of a server that runs."""
    namespace = paths.namespace
    record = read_record(paths)
    if record is None and not paths.statefile.exists():
        return only_starting(namespace)
    if record is not None and record.release != __version__:
        release = f"release {record.release}" if record.release else "an earlier release"
        return UnansweredError(
            f"the server in namespace {namespace} is of {release}, this command of {__version__}",
            "use the `dynamo` that started it, or end it: `dynamo stop`",
        )
    if not paths.run_dir.exists():
        return _removed(paths.run_dir)
    if record is None or record.phase == "running" or paths.blueprint_file.exists():
        return _removed(f"a file in {paths.run_dir}")
    if record.phase == "stopping":
        return UnansweredError(
            f"the server in namespace {namespace} is stopping", "`dynamo ls` shows whether it has ended"
        )
    return only_starting(namespace)


def _removed(what: object) -> UnansweredError:
    return UnansweredError(f"{what} was removed: the server goes on, and makes it again", "try again in a moment")


def status_of(error: DynamoError) -> int:
    """Return the status of an answer. What is not the fault of the order is 503."""
    if isinstance(error, EndpointAbsentError | ItemAbsentError | KeyAbsentError | OrderAbsentError):
        return NOT_FOUND
    if isinstance(error, EndpointConflictError | KeyConflictError):
        return CONFLICT
    if isinstance(error, OrderTooLargeError):
        return TOO_LARGE
    return BAD_REQUEST if isinstance(error, UsageError) else UNAVAILABLE


def content_of(error: DynamoError) -> Any:
    """Return the content of an answer that tells the error."""
    status = status_of(error)
    param = error.param if isinstance(error, OrderError) else None
    kind = UNANSWERED if isinstance(error, UnansweredError) else KINDS[status]
    return _Answer(ErrorBody(str(error), kind, status, error.cause, error.remedy, param))


def told_by(content: bytes) -> ErrorBody | None:
    """Return the error that an answer tells; None if it tells none."""
    try:
        return msgspec.json.decode(content, type=_Answer).error
    except msgspec.DecodeError:
        return None


def error_of(status: int, content: bytes) -> DynamoError:
    """Inverse of `content_of`, as far as those who ask distinguish errors."""
    kinds: dict[int, type[DynamoError]] = {
        BAD_REQUEST: UsageError,
        TOO_LARGE: UsageError,
        NOT_FOUND: EndpointAbsentError,
        CONFLICT: EndpointConflictError,
    }
    told = told_by(content)
    if told is None:
        return UnansweredError(f"the server answered with status {status}", "see `dynamo logs`")
    if told.type == UNANSWERED:
        return UnansweredError(told.cause, told.remedy)
    return kinds.get(status, SupervisorError)(told.cause, told.remedy)
