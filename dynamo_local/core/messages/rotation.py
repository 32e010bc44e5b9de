"""Messages about the token of NATS: the order to replace it, and what the server and its processes say of that.

No token is ever in a message: processes read it from the file of the bus's address.
"""

from __future__ import annotations

import msgspec

from dynamo_local.core.codec import VERSION


class RotateToken(msgspec.Struct, frozen=True, tag="rotate"):
    """Order to replace the token. Sent again with the same `order` it asks how far that is."""

    order: str
    v: int = VERSION


class RotationAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far an order is.

    `finished`: the token is replaced. `processes`: number of those that took the new one; `disconnected`: watchers of
    those that did not say so in time, and connect again by themselves. `refused`: why the order was not carried out,
    and `remedy` what to do.
    """

    finished: bool = False
    processes: int = 0
    disconnected: tuple[str, ...] = ()
    refused: str = ""
    remedy: str = ""
    v: int = VERSION


class AddressChanged(msgspec.Struct, frozen=True, tag="changed"):
    """Tells all processes to read the address of the bus anew."""

    v: int = VERSION


class AddressTaken(msgspec.Struct, frozen=True, omit_defaults=True):
    """A process is connected as `user`. `lease`: its own; empty for a command."""

    lease: str = ""
    user: str | None = None
    v: int = VERSION
