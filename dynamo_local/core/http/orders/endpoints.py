"""REST requests about endpoints as orders to the server, and its answers as REST has them. Pure."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import unquote

import msgspec

from dynamo_local.core.errors import ConfigError
from dynamo_local.core.http.bounds.admission import Refusal
from dynamo_local.core.http.json_text import as_utf8, why_not
from dynamo_local.core.http.paths import ENDPOINTS, PARK, SCALE, WAKE
from dynamo_local.core.messages.endpoints import (
    CreateEndpoint,
    DeleteEndpoint,
    EndpointOrder,
    EndpointRefusal,
    EndpointsAnswer,
    EndpointView,
    ListEndpoints,
    ParkEndpoint,
    ScaleEndpoint,
    UpdateEndpoint,
    WakeEndpoint,
)
from dynamo_local.core.names import check_endpoint

MOST_BYTES = 256 * 1024
"""Largest body of an order, in bytes: a quarter of what fits into one message on the bus."""

_KINDS: Final = {400: "BadRequestError", 404: "NotFoundError", 409: "ConflictError", 503: "ServiceUnavailableError"}
_RETRY_S = 2


class _Scale(msgspec.Struct, forbid_unknown_fields=True):
    workers: int | None = None
    prefill_workers: int | None = None


def order_of(method: str, path: str, body: bytes, by: str = "") -> EndpointOrder | Refusal:
    """Return the order that a request stands for. Method and path are open ones (paths.py). `by`: name of the key of
    who asks."""
    order = _order_of(method, path, body)
    if not by or isinstance(order, Refusal | ListEndpoints):
        return order
    return msgspec.structs.replace(order, by=by)


def _order_of(method: str, path: str, body: bytes) -> EndpointOrder | Refusal:
    name, _, action = path.removeprefix(ENDPOINTS).removeprefix("/").partition("/")
    try:
        checked = check_endpoint(unquote(name)) if name else None
    except ConfigError as error:
        return bad_order(str(error), "name")
    if method == "GET":
        return ListEndpoints(checked)
    if method == "DELETE":
        return DeleteEndpoint(checked or "")
    is_rest = "/" + action in (PARK, WAKE)
    fields = {} if is_rest and not body else fields_of_order(body)
    if isinstance(fields, Refusal):
        return fields
    if checked is None:
        return CreateEndpoint(fields)
    if is_rest:
        return _rest(checked, "/" + action, fields)
    return _scale(checked, fields) if "/" + action == SCALE else _update(checked, fields)


def _rest(name: str, action: str, fields: dict[str, Any]) -> EndpointOrder | Refusal:
    if fields:
        field = next(iter(fields))
        return bad_order(f"{action[1:]} has no field {field[:60]!r}", field)
    return ParkEndpoint(name) if action == PARK else WakeEndpoint(name)


def _update(name: str, fields: dict[str, Any]) -> EndpointOrder | Refusal:
    if fields.pop("name", name) != name:
        return bad_order("the name of an endpoint cannot be changed", "name")
    return UpdateEndpoint(name, fields)


def _scale(name: str, fields: dict[str, Any]) -> EndpointOrder | Refusal:
    try:
        wanted = msgspec.convert(fields, _Scale)
    except msgspec.ValidationError as error:
        return bad_order(str(error), None)
    numbers = {"workers": wanted.workers, "prefill_workers": wanted.prefill_workers}
    if all(number is None for number in numbers.values()):
        return bad_order("workers or prefill_workers is needed", "workers")
    for field, number in numbers.items():
        if number is not None and not 0 <= number < 2**31:
            return bad_order(f"{field} must be a number from 0 on, got {number}", field)
    return ScaleEndpoint(name, wanted.workers, wanted.prefill_workers)


def fields_of_order(body: bytes) -> dict[str, Any] | Refusal:
    """Return the fields in the body of an order."""
    if len(body) > MOST_BYTES:
        return Refusal(413, f"the body is larger than {MOST_BYTES} bytes", "BadRequestError")
    text = body
    try:
        text = as_utf8(body)
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return bad_order(f"the body is not a JSON object: {why_not(text, error)}", None)


def rendered(order: EndpointOrder, answer: EndpointsAnswer) -> tuple[int, dict[str, Any]] | Refusal:
    """Return status and content of the answer to an order."""
    if answer.refused is not None:
        return refusal_from(answer.refused)
    if isinstance(order, ListEndpoints) and order.name is None:
        return 200, {"object": "list", "data": [shown(view) for view in answer.endpoints]}
    if not answer.endpoints:
        name = getattr(order, "name", "")
        if isinstance(order, DeleteEndpoint):
            return 200, {"object": "endpoint", "name": name, "deleted": True}
        return Refusal(404, f"there is no endpoint {name}", "NotFoundError", "name")
    return _status(order), shown(answer.endpoints[0])


def _status(order: EndpointOrder) -> int:
    """Return the status of success: 202 where the order is taken, and carried out from now on."""
    if isinstance(order, CreateEndpoint):
        return 201
    return 200 if isinstance(order, ListEndpoints) else 202


def shown(view: EndpointView) -> dict[str, Any]:
    """Return an endpoint as REST shows it, fields with default values included."""
    ordered = {} if view.adapter is None else {"adapter": _all_fields(view.adapter)}
    return {
        "object": "endpoint",
        **_all_fields(view.spec),
        "status": _all_fields(view.status),
        **ordered,
        "served_names": list(view.served_names),
        "history": _all_fields(view.history),
        "created_at": view.created_at,
        "updated_at": view.updated_at,
    }


def _all_fields(of: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(of, name) for name in of.__struct_fields__}


def refusal_from(refused: EndpointRefusal) -> Refusal:
    """Return the answer to an order that the server refuses."""
    status = refused.status if refused.status in _KINDS else 400
    message = f"{refused.cause}; {refused.remedy}" if refused.remedy else refused.cause
    retry = _RETRY_S if status == 503 else None
    return Refusal(status, message, _KINDS[status], retry_after_s=retry)  # type: ignore[arg-type]  # one of _KINDS


def bad_order(message: str, param: str | None) -> Refusal:
    """Return the answer to an order that cannot be understood."""
    return Refusal(400, message, "BadRequestError", param)
