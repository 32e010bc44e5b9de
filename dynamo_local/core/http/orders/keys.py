"""REST requests about API keys as orders to the server, and its answers as REST has them. Pure."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import msgspec

from dynamo_local.core.errors import ConfigError
from dynamo_local.core.http.bounds.admission import Refusal
from dynamo_local.core.http.orders.endpoints import bad_order, fields_of_order, refusal_from
from dynamo_local.core.http.paths import KEYS
from dynamo_local.core.keys.checks import check_key
from dynamo_local.core.messages.keys import CreateKey, KeyOrder, KeysAnswer, KeyView, ListKeys, RevokeKey, RotateKey


def key_order_of(method: str, path: str, body: bytes, by: str) -> KeyOrder | Refusal:
    """Return the order that a request stands for. Method and path are open ones (paths.py). `by`: name of the key of
    who asks."""
    name, _, action = path.removeprefix(KEYS).removeprefix("/").partition("/")
    try:
        checked = check_key(unquote(name)) if name else None
    except ConfigError as error:
        return bad_order(str(error), "name")
    if method == "GET":
        return ListKeys(checked, by)
    fields = fields_of_order(body) if body or checked is None else {}
    if isinstance(fields, Refusal):
        return fields
    if checked is None:
        return CreateKey(fields, by)
    if action:
        return _unknown(fields, "overlap_s") or RotateKey(checked, fields.get("overlap_s"), by)
    opens = fields.get("open", False)
    if not isinstance(opens, bool):
        return bad_order("open must be true or false", "open")
    return _unknown(fields, "open") or RevokeKey(checked, opens, by)


def _unknown(fields: dict[str, Any], known: str) -> Refusal | None:
    other = next((field for field in fields if field != known), None)
    return None if other is None else bad_order(f"there is no field {other[:60]!r}; there is {known}", other)


def rendered_keys(order: KeyOrder, answer: KeysAnswer) -> tuple[int, dict[str, Any]] | Refusal:
    """Return status and content of the answer to an order."""
    if answer.refused is not None:
        return refusal_from(answer.refused)
    if isinstance(order, ListKeys) and order.name is None:
        return 200, {"object": "list", "data": [_shown(view) for view in answer.keys]}
    if isinstance(order, RevokeKey):
        return 200, {"object": "key", "name": order.name, "deleted": True}
    shown = _shown(answer.keys[0]) if answer.keys else {"object": "key"}
    if answer.secret is not None:
        shown["secret"] = answer.secret
    return 201 if isinstance(order, CreateKey) else 200, shown


def _shown(view: KeyView) -> dict[str, Any]:
    return {"object": "key", **msgspec.structs.asdict(view)}
