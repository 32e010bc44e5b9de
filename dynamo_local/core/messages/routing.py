"""Messages between frontends and the router."""

from __future__ import annotations

import msgspec

from dynamo_local.core.codec import VERSION


class AssignRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Question for the worker to take a request. `avoid`: leases of workers that have just failed it."""

    request_id: str
    frontend: str
    tokens: int
    avoid: tuple[str, ...] = ()
    v: int = VERSION


class Assignment(msgspec.Struct, frozen=True, omit_defaults=True):
    """The lease of the worker to take the request; None if no worker is routable."""

    worker: str | None
    v: int = VERSION


class Charge(msgspec.Struct, frozen=True, array_like=True):
    """A request counted as load of a worker, with its tokens."""

    request_id: str
    worker: str
    tokens: int


class Charges(msgspec.Struct, frozen=True):
    """All requests of a frontend that workers have. Sent at intervals, so that lost messages do no lasting harm."""

    frontend: str
    charges: tuple[Charge, ...]
    v: int = VERSION


class Released(msgspec.Struct, frozen=True):
    """The request is no longer load of the worker to which it was assigned."""

    request_id: str
    frontend: str
    v: int = VERSION
