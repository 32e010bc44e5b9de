"""Messages between frontends and the router."""

from __future__ import annotations

import msgspec

from dynamo_local.core.codec import VERSION


class AssignRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which worker is to take this request? `avoid` names leases that just failed it."""

    request_id: str
    frontend: str
    tokens: int
    avoid: tuple[str, ...] = ()
    v: int = VERSION


class Assignment(msgspec.Struct, frozen=True, omit_defaults=True):
    """The router's answer. None: no worker is routable."""

    worker: str | None
    v: int = VERSION


class Charge(msgspec.Struct, frozen=True, array_like=True):
    """A request that burdens a worker."""

    request_id: str
    worker: str
    tokens: int


class Charges(msgspec.Struct, frozen=True):
    """All that a frontend has with workers now; told now and then, so that words that were lost do no lasting harm."""

    frontend: str
    charges: tuple[Charge, ...]
    v: int = VERSION


class Released(msgspec.Struct, frozen=True):
    """The request no longer burdens the worker it was assigned to."""

    request_id: str
    frontend: str
    v: int = VERSION
