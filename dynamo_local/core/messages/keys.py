"""Messages about API keys: orders to the server and its answers. A secret is in the answer that makes it, and nowhere
else."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo_local.core.codec import VERSION
from dynamo_local.core.keys.values import KeyTerms
from dynamo_local.core.messages.endpoints import EndpointRefusal


class KeyView(KeyTerms, frozen=True, omit_defaults=True, kw_only=True):
    """A key as commands and REST show it.

    `former_until`: until when the secret before the last rotation is valid; None: it is not.
    """

    created_at: float
    former_until: float | None = None


class ListKeys(msgspec.Struct, frozen=True, omit_defaults=True, tag="list"):
    """Question for all keys, or for the one of this name."""

    name: str | None = None
    by: str = ""
    v: int = VERSION


class CreateKey(msgspec.Struct, frozen=True, omit_defaults=True, tag="create"):
    """Order for one more key. `fields` are as they came, and are checked by the server. `by`: name of the key of who
    orders; empty: the owner of the server."""

    fields: dict[str, Any]
    by: str = ""
    v: int = VERSION


class RotateKey(msgspec.Struct, frozen=True, omit_defaults=True, tag="rotate"):
    """Order for another secret. `overlap_s`: as it came, how long the former one stays valid; None: the default."""

    name: str
    overlap_s: Any = None
    by: str = ""
    v: int = VERSION


class RevokeKey(msgspec.Struct, frozen=True, omit_defaults=True, tag="revoke"):
    """Order to remove a key. `opens`: also if it is the last one, so that the server answers everybody."""

    name: str
    opens: bool = False
    by: str = ""
    v: int = VERSION


KeyOrder = ListKeys | CreateKey | RotateKey | RevokeKey


class KeysAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The keys asked for, or the one that was ordered, as it is now; or a refusal. `secret`: of the key that was
    created or rotated."""

    keys: tuple[KeyView, ...] = ()
    secret: str | None = None
    refused: EndpointRefusal | None = None
    v: int = VERSION
