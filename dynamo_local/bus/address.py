"""The address of a NATS server, or of a cluster. Apart from nats.py, so that it can be read without importing the NATS
client."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from dynamo_local.core.errors import BusError


class BusAddress(msgspec.Struct, frozen=True):
    """URL and token of a NATS server. The token is a secret: keep it in files of mode 0600, never in argv or logs.

    As JSON it is bus.json, from which the processes of a server read where their bus is.
    """

    url: str
    """Of one server (nats:// or tls://), or those of a cluster's servers, separated by commas."""
    token: str | None = None
    user: str | None = None
    """The user whose password the token is. None: the server asks for a token alone, or for nothing."""
    ca: str | None = None
    """The certificate of the authority that has signed the server's (PEM); no secret. None: one that this machine
    trusts, or no TLS."""

    @classmethod
    def load(cls, path: Path) -> BusAddress:
        """Read the address from the runtime directory. Raises BusError."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise BusError(f"no bus address in {path}: {error}", "is the server running?") from error

    @property
    def urls(self) -> tuple[str, ...]:
        """The URL of each server."""
        return tuple(self.url.split(","))

    @property
    def wants_tls(self) -> bool:
        """Whether nothing may be said to the server without TLS."""
        return self.ca is not None or any(url.startswith("tls://") for url in self.urls)

    @property
    def shown(self) -> str:
        """The URLs without credentials, fit for logs and errors."""
        try:
            parts = [urlsplit(url) for url in self.urls]
        except ValueError:
            return "an address that is not a URL"
        return ",".join(part._replace(netloc=part.netloc.rpartition("@")[2]).geturl() for part in parts)

    def __repr__(self) -> str:
        return f"BusAddress({self.shown!r}, token={'***' if self.token else None})"
