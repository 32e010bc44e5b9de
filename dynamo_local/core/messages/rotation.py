"""Messages about the token of NATS: what the server and its processes say of a new one.

No token is ever in a message: processes read it from the file of the bus's address.
"""

from __future__ import annotations

from dynamo_local.core.codec import Message


class AddressChanged(Message, frozen=True, tag="changed"):
    """Tells all processes to read the address of the bus anew."""


class AddressTaken(Message, frozen=True, omit_defaults=True):
    """A process is connected as `user`. `lease`: its own; empty for a command."""

    lease: str = ""
    user: str | None = None
