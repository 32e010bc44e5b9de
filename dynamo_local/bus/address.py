"""The address of a NATS server. Apart from nats.py, so that it can be read without importing the NATS client."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from dynamo_local.core.errors import BusError


class BusAddress(msgspec.Struct, frozen=True):
    """URL and token of a NATS server. The token is a secret: keep it in files of mode 0600, never in argv or logs."""

    url: str
    token: str | None = None
    user: str | None = None
    """The user whose password the token is. None: the server asks for a token alone, or for nothing."""

    @classmethod
    def load(cls, path: Path) -> BusAddress:
        """Read the address from the runtime directory. Raises BusError."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise BusError(f"no bus address in {path}: {error}", "is the server running?") from error

    @property
    def shown(self) -> str:
        """The URL without credentials, fit for logs and errors."""
        try:
            parts = urlsplit(self.url)
        except ValueError:
            return "an address that is not a URL"
        return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()

    def __repr__(self) -> str:
        return f"BusAddress({self.shown!r}, token={'***' if self.token else None})"
