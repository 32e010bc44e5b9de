"""The heads of requests: their bounds, and what the gate has found of them."""

from __future__ import annotations

from itertools import chain

import msgspec

from components.frontend.http.callers import Caller
from dynamo_local.core.http.asgi import HeaderMap, Scope
from dynamo_local.core.http.bounds.admission import AdmissionLimits, Refusal
from dynamo_local.core.http.paths import Route


class Asked(msgspec.Struct, frozen=True):
    """A request that the gate lets in. `headers`: those of its `scope`."""

    route: Route
    scope: Scope
    headers: HeaderMap
    caller: Caller


def examine_head(scope: Scope, limits: AdmissionLimits) -> Refusal | None:
    """Return the answer to a request whose head is too large."""
    headers = scope["headers"]
    if len(headers) > limits.max_headers:
        why = f"more than {limits.max_headers} headers (setting max-headers)"
    elif _bytes(scope) > limits.max_header_bytes:
        why = f"path and headers are larger than {limits.max_header_bytes} bytes (setting max-header-bytes)"
    else:
        return None
    return Refusal(431, why, "BadRequestError")


def examine_coding(headers: HeaderMap) -> Refusal | None:
    """Return the answer to a request whose body is compressed."""
    coding = headers.get(b"content-encoding", b"")
    if coding.lower() in (b"", b"identity"):
        return None
    why = f"the body is compressed ({coding.decode('latin-1')[:60]}): send it as it is, without Content-Encoding"
    return Refusal(415, why, "UnsupportedMediaTypeError")


def _bytes(scope: Scope) -> int:
    headers = sum(map(len, chain.from_iterable(scope["headers"])))
    return len(scope["path"]) + len(scope.get("query_string", b"")) + headers
