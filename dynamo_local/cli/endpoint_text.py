"""Endpoints as text. Pure, apart from the local time zone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from dynamo_local.cli.output import date, facts, table
from dynamo_local.core.endpoints.adapters import most_rank, room_of, takes_adapters
from dynamo_local.core.endpoints.idling import in_words, times_of
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.messages.endpoints import EndpointStatus, EndpointView, progress_of
from dynamo_local.sdk.config.resolved import shown
from dynamo_local.supervisor.admin.endpoints import EndpointRow

_HEADERS = ("NAME", "STATE", "READY", "WORKERS", "MODEL", "REASON")
_UNKNOWN = "-"


def as_json_text(shown: EndpointRow | EndpointView | Sequence[EndpointRow]) -> str:
    """Return endpoints as indented JSON, with all fields, those included that have their default."""
    plain = list(map(_all_fields, shown)) if isinstance(shown, Sequence) else _all_fields(shown)
    return msgspec.json.format(msgspec.json.encode(plain), indent=2).decode()


def table_of(rows: Sequence[EndpointRow]) -> str:
    """Return a line for each endpoint."""
    if not rows:
        return "there are no endpoints; create one: dynamo endpoint create NAME --model MODEL"
    return table(_HEADERS, [_cells(row) for row in rows])


def description_of(row: EndpointRow) -> str:
    """Return everything known of an endpoint, a line for each fact."""
    return facts(facts_of(row))


def facts_of(of: EndpointRow | EndpointView) -> Iterator[tuple[str, str]]:
    """Return the name and the text of each fact about an endpoint; a text is empty where it has no such thing."""
    spec, status = of.spec, of.status
    yield "endpoint", spec.name
    yield "state", _state(status)
    yield "last", f"{of.history.last}, {date(of.history.last_at)}" if of.history.last else ""
    yield "model", model_of(spec)
    yield "names", ", ".join(of.served_names)
    if spec.adapter_of is None:
        yield "revision", "" if status is None else str(status.revision)
        yield from _of_workers(spec, status)
    yield "labels", ", ".join(f"{key}={value}" for key, value in sorted(spec.labels.items()))
    yield "created", date(of.created_at)
    yield "updated", date(of.updated_at) if of.updated_at != of.created_at else ""


def _all_fields(shown: EndpointRow | EndpointView) -> dict[str, Any]:
    asdict = msgspec.structs.asdict
    ordered = shown.adapter if isinstance(shown, EndpointView) else None
    return {
        "spec": asdict(shown.spec),
        "status": None if shown.status is None else asdict(shown.status),
        "created_at": shown.created_at,
        "updated_at": shown.updated_at,
        "served_names": shown.served_names,
        **({} if ordered is None else {"adapter": asdict(ordered)}),
        "history": asdict(shown.history),
    }


def ordered_text(view: EndpointView) -> str:
    """Return what has come of an order, a line for each fact."""
    return "\n".join([*([] if view.adapter is None else [view.adapter.reason]), progress_of(view)])


def _cells(row: EndpointRow) -> tuple[str, ...]:
    spec, status = row.spec, row.status
    if status is None:
        return spec.name, _UNKNOWN, _UNKNOWN, bounds_of(spec), model_of(spec), ""
    return spec.name, status.state, _ready(status), bounds_of(spec), model_of(spec), status.reason


def _ready(status: EndpointStatus) -> str:
    decode = f"{status.ready}/{status.wanted}"
    prefill = f" + {status.ready_prefill}/{status.wanted_prefill}" if status.wanted_prefill else ""
    return decode + prefill if status.wanted else _UNKNOWN


def model_of(spec: EndpointSpec) -> str:
    """Return what an endpoint serves: its model, or its adapter with the endpoint that serves it."""
    return spec.model if spec.adapter_of is None else f"{spec.model}, adapter of {spec.adapter_of}"


def bounds_of(spec: EndpointSpec) -> str:
    """Return the bounds of an endpoint's workers, such as "1-4", or "1-4 + 1-2" with prefill workers."""
    if spec.adapter_of is not None:
        return _UNKNOWN
    decode = _range(spec.min_workers, spec.most_workers)
    return f"{decode} + {_range(spec.min_prefill_workers, spec.most_prefill_workers)}" if spec.disaggregated else decode


def _range(least: int, most: int) -> str:
    return str(least) if least == most else f"{least}-{most}"


def _state(status: EndpointStatus | None) -> str:
    if status is None:
        return "no server runs"
    return f"{status.state}: {status.reason}" if status.reason else status.state


def _of_workers(spec: EndpointSpec, status: EndpointStatus | None) -> Iterator[tuple[str, str]]:
    numbers = "" if status is None else _numbers(status.ready, status.starting, status.wanted, status.parked)
    yield "workers", numbers + _bounded(spec.min_workers, spec.most_workers)
    if spec.disaggregated:
        numbers = "" if status is None else _numbers(status.ready_prefill, 0, status.wanted_prefill)
        yield "prefill workers", numbers + _bounded(spec.min_prefill_workers, spec.most_prefill_workers)
    times = times_of(spec)
    yield "parked", "never" if times.park_s is None else f"after {in_words(times.park_s)} without a request"
    yield "asleep", "never" if times.sleep_s is None else f"after {in_words(times.sleep_s)} without a request"
    yield "awake", ", ".join([*spec.awake, *(["when it was often used"] if spec.forecast else [])])
    yield "devices", "as its settings need" if spec.gpu is None else f"{spec.gpu:g} for each worker"
    yield "engine", spec.engine
    room = f"{room_of(spec)} at a time, of rank {most_rank(spec)} at most"
    yield "adapters", room if takes_adapters(spec) else ""
    aim = f", {spec.requests_per_worker:g} requests for each worker" if spec.policy == "concurrency" else ""
    yield "policy", f"{spec.policy}{aim}"
    yield "arguments", "\n".join(f"{key}: {shown(key, value)}" for key, value in sorted(spec.args.items()))


def _numbers(ready: int, starting: int, wanted: int, parked: int = 0) -> str:
    others = "".join(f", {number} {what}" for what, number in (("starting", starting), ("parked", parked)) if number)
    return f"{ready} of {wanted} ready{others}; "


def _bounded(least: int, most: int) -> str:
    return f"at least {least}, at most {most}"
