"""What clients do wrong is told to them, and is no event of the server.

vLLM logs a traceback of several kilobytes for a request that it refuses while it streams.
"""

from __future__ import annotations

import logging

from vllm.exceptions import GracefulHTTPError, VLLMClientError


def drop_clients_errors() -> None:
    """Have vLLM's log, in this process, leave out what its clients have been told."""
    for handler in logging.getLogger("vllm").handlers:
        if not any(isinstance(known, ClientErrors) for known in handler.filters):
            handler.addFilter(ClientErrors())


class ClientErrors(logging.Filter):
    """Passes everything but tracebacks of errors that are a client's, or that were answered on purpose."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, VLLMClientError | GracefulHTTPError)
