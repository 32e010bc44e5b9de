"""The tree of errors.

An error has two short sentences: its cause, and what the reader can do about it. At the boundary (command line, service
process, HTTP) they are shown as one line. The adapter of a foreign library turns the library's errors into these,
`from` their cause.
"""

from __future__ import annotations


class DynamoError(Exception):
    """Root of the tree. `exit_code` is the exit status of a process that ends with the error."""

    exit_code = 1

    def __init__(self, cause: str, remedy: str | None = None) -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy

    def __str__(self) -> str:
        return self.cause if self.remedy is None else f"{self.cause}; {self.remedy}"


class UsageError(DynamoError):
    """The user asks for something impossible. Nothing was started or changed."""

    exit_code = 2


class OrderError(UsageError):
    """An order cannot be understood. `param`: the field at fault."""

    def __init__(self, cause: str, remedy: str | None = None, *, param: str | None = None) -> None:
        super().__init__(cause, remedy)
        self.param = param


class OrderAbsentError(UsageError):
    """A question names an order that the server does not know."""


class OrderTooLargeError(OrderError):
    """The text of an order is longer than any needs to be."""


class GraphError(UsageError):
    """A graph cannot be loaded, or is not well formed: missing module, unknown service, cycle."""


class ConfigError(UsageError):
    """A configuration names an unknown service or key, or a value has the wrong type."""


class DeviceError(UsageError):
    """The requested devices do not exist or are not free."""


class MemoryShortError(UsageError):
    """The machine has too little free memory. `missing`: how much more would be needed, in bytes."""

    def __init__(self, cause: str, remedy: str | None = None, missing: int = 0) -> None:
        super().__init__(cause, remedy)
        self.missing = missing


class NamespaceBusyError(UsageError):
    """Another server is running in the namespace."""


class PortInUseError(UsageError):
    """The address to listen on is in use."""


class NotRunningError(UsageError):
    """No server is running in the namespace, or it has no such service."""


class EndpointAbsentError(UsageError):
    """An order or a question names an endpoint that does not exist."""


class EndpointConflictError(UsageError):
    """An order contradicts the endpoints there are: a name twice, a base without which adapters would be left."""


class KeyAbsentError(UsageError):
    """No API key has that name."""


class KeyConflictError(UsageError):
    """An order contradicts the API keys there are: a name twice, the last key without a word on what follows."""


class EndpointFailedError(DynamoError):
    """An endpoint does not answer, and will not without another order."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(
            f"endpoint {name} has failed: {reason}", f"it stays ordered: `dynamo endpoint update {name}` changes it"
        )


class FetchError(DynamoError):
    """A model could not be fetched: the network, the hub or the disk failed. Trying again may help."""


class StateError(DynamoError):
    """The statefile cannot be read, written or understood."""


class ItemAbsentError(UsageError):
    """A store has no such item, or not for who asks."""


class StorageFullError(StateError):
    """A store takes no more: its own bounds, or the disk's."""


class SupervisorError(DynamoError):
    """circus refused a command, did not answer in time, or a service could not be started or stopped."""


class UnansweredError(SupervisorError):
    """The server does not answer, or is starting and does not take orders yet."""


class SilentNodeError(SupervisorError):
    """A node does not answer. What ran there may still run."""


class NodeStartError(SupervisorError):
    """No node server can be started on a node: nothing runs there. Trying again may help, later."""


class BusError(DynamoError):
    """NATS cannot be reached, refused an operation, or did not answer in time."""


class BusDownError(BusError):
    """The connection to NATS is down. The bus logs that itself, and when it is there again."""


class BusRefusedError(BusError):
    """NATS does not take the token."""


class NobodyListensError(BusError):
    """No process listens on the subject of a question."""


class QueueAbsentError(BusError):
    """The prefill queue does not exist: it was not created, or has been deleted."""


class QueueFullError(BusError):
    """The prefill queue takes no more jobs."""


class DecodeError(DynamoError):
    """Bytes from the bus or a file are not the expected message, or of another version."""


class RpcError(DynamoError):
    """A call to another service of the graph failed: no server, silence, or an error raised by its endpoint."""


class EngineError(DynamoError):
    """An engine cannot start, or died."""


class RequestError(DynamoError):
    """A request cannot be continued. Other requests are not affected."""


class BadRequestError(RequestError):
    """A request's client asks for something that no worker can do."""


class AdapterError(BadRequestError):
    """The adapter that a request asks for cannot be loaded, whoever asks. `reason`: for its owner, with folders."""

    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(cause)
        self.reason = reason


def one_line(error: BaseException) -> str:
    """Return the text of an error that is none of these in one line, of at most 400 characters."""
    return " ".join(str(error).split())[:400] or type(error).__name__
