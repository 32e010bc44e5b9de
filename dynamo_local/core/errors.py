"""The one tree of errors.

An error carries two short sentences: its cause, and what the reader can do about it. At the boundary (command
line, service process, HTTP) they are shown as one line. Errors of foreign libraries become one of these in the
adapter that called the library, `from` their cause.
"""

from __future__ import annotations


class DynamoError(Exception):
    """Root of the tree. `exit_code` is what a process ends with when the error reaches its boundary."""

    exit_code = 1

    def __init__(self, cause: str, remedy: str | None = None) -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy

    def __str__(self) -> str:
        return self.cause if self.remedy is None else f"{self.cause}; {self.remedy}"


class UsageError(DynamoError):
    """The user asked for something that cannot be done as asked. Nothing was started or changed."""

    exit_code = 2


class GraphError(UsageError):
    """A graph cannot be loaded or is not well formed: missing module, unknown service, cycle."""


class ConfigError(UsageError):
    """A configuration names an unknown service or key, or a value has the wrong type."""


class DeviceError(UsageError):
    """The devices asked for are not there or not free."""


class NamespaceBusyError(UsageError):
    """Another server runs in the namespace."""


class PortInUseError(UsageError):
    """The address to listen on is taken."""


class NotRunningError(UsageError):
    """No server runs in the namespace, or it has no such service."""


class StateError(DynamoError):
    """The statefile cannot be read, written or understood."""


class SupervisorError(DynamoError):
    """circus refused a command, did not answer in time, or a service could not be started or stopped."""


class BusError(DynamoError):
    """NATS cannot be reached, refused an operation, or did not answer in time."""


class QueueAbsentError(BusError):
    """There is no prefill queue: nobody has created it, or it is gone."""


class QueueFullError(BusError):
    """The prefill queue takes no more jobs."""


class DecodeError(DynamoError):
    """Bytes from the bus or a file are not the message they should be, or of a version not understood."""


class RpcError(DynamoError):
    """A call to another service of the graph failed: no server, silence, or an error raised by its endpoint."""


class EngineError(DynamoError):
    """An engine cannot start, or died."""


class RequestError(DynamoError):
    """One request cannot be carried on. Never affects another request."""


class BadRequestError(RequestError):
    """What the request's client asks for cannot be done, by whichever worker: the fault is its own."""
