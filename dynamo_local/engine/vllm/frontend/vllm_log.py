"""vLLM's log in a frontend: requests are written to it on demand, and errors of clients never are.

A client whose request is refused has been told, and the server has no problem. vLLM logs a traceback of several
kilobytes for a request that it refuses while it streams.
"""

from __future__ import annotations

import logging

from vllm.exceptions import GracefulHTTPError, VLLMClientError

_OF_REQUESTS = ("vllm.entrypoints.serve.utils.request_logger", "vllm.v1.engine.async_llm")


def show_requests() -> None:
    """Have vLLM's log hold requests and outputs, which are of level INFO. Of all else it holds what it held before."""
    for name in _OF_REQUESTS:
        logging.getLogger(name).setLevel(logging.INFO)
    for handler in logging.getLogger("vllm").handlers:
        handler.setLevel(min(handler.level, logging.INFO))


def drop_clients_errors() -> None:
    """Filter vLLM's log in this process. A second call changes nothing."""
    for handler in logging.getLogger("vllm").handlers:
        if not any(isinstance(known, ClientErrors) for known in handler.filters):
            handler.addFilter(ClientErrors())


class ClientErrors(logging.Filter):
    """Passes everything but tracebacks of errors that are a client's, or that were answered on purpose."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, VLLMClientError | GracefulHTTPError)
