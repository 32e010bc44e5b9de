"""docs/reference/control-api.md: what can be asked of a server on its socket, from the table of operations."""

from __future__ import annotations

from collections.abc import Iterator

from dynamo_local.control.errors import KINDS
from dynamo_local.control.operations import MOST_BYTES, OPERATIONS, Operation
from scripts.reference import markdown

_SOCKET = "~/.dynamo/state/dynamo.run/control.sock"
_HEAD = (
    "The server answers HTTP and JSON on a unix socket that its owner alone can open: `control.sock` in the folder "
    "`NAMESPACE.run` of the state folder, or, where that path would be too long for a socket, in the folder to which "
    "`NAMESPACE.run/sockets` leads. It answers from before its first process starts until the last one has ended. "
    "Commands and frontends are clients of it, and so can be any program of yours:",
    f"```sh\ncurl --silent --unix-socket {_SOCKET} http://localhost/v1/keys\n"
    f"curl --silent --unix-socket {_SOCKET} http://localhost/openapi.json\n```",
    f"A body is a JSON object of at most {MOST_BYTES // 1024} KiB. An order is answered when it is durable; what is "
    "carried out after that has status 202.",
    'An error is `{"error": {"message", "type", "code", "cause", "remedy", "param"}}`, where `message` is cause and '
    f"remedy together. Its status is {', '.join(f'{status} ({kind})' for status, kind in KINDS.items())}. "
    "503 has `Retry-After`: the server is starting, or a part that it needs does not answer.",
    "Administrators reach the same paths of endpoints, keys and usage at the server's HTTP address: "
    "[HTTP API](http-api.md).",
)


def page() -> str:
    """Return the text of the page."""
    head = [text if text.startswith("```") else markdown.paragraph(text) for text in _HEAD]
    return markdown.page("Control API", [*head, *(text for operation in OPERATIONS for text in _section(operation))])


def _section(operation: Operation) -> Iterator[str]:
    yield f"## {operation.method} {operation.path}"
    yield markdown.paragraph(operation.does + ("" if operation.status == 200 else f" Status {operation.status}."))
    for title, fields in (("field", operation.takes), ("parameter", operation.query)):
        if fields:
            yield markdown.table((title, "is"), [(markdown.code(name), what) for name, what in fields.items()])
