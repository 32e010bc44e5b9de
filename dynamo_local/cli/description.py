"""Descriptions of watchers, endpoints and requests (control/descriptions.py) as text. Pure, apart from the local time
zone."""

from __future__ import annotations

from collections.abc import Iterator

from dynamo_local.cli.endpoint_text import facts_of
from dynamo_local.cli.output import date, facts
from dynamo_local.control.descriptions import EndpointDescription, WatcherDescription
from dynamo_local.core.messages.admin import RequestLine
from dynamo_local.core.messages.endpoints import BoardRevision
from dynamo_local.core.messages.presence import Counts, EngineInfo, Load
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.names import short_watcher

_UNKNOWN = "unknown"
Field = tuple[str, str]
"""Name of a line, and its text."""


def text_of(found: WatcherDescription | EndpointDescription | RequestLine) -> str:
    """Return a description with a line for each fact; what a process does not have is left out."""
    match found:
        case WatcherDescription():
            fields = _of_watcher(found)
        case EndpointDescription():
            fields = _of_endpoint(found)
        case RequestLine():
            fields = _of_request(found)
    return facts(fields)


def _of_watcher(found: WatcherDescription) -> Iterator[Field]:
    yield "watcher", found.watcher
    yield "service", f"{found.component} ({found.role})"
    yield "revision", found.revision
    yield "state", f"{found.state}: {found.detail}" if found.detail else found.state
    yield "pid", "-" if found.pid is None else str(found.pid)
    yield "children", "\n".join(found.children)
    yield "devices", ", ".join(map(str, found.devices))
    yield "running for", "" if found.age_s is None else _span(found.age_s)
    yield "starts", f"{found.starts} since the server started"
    yield "deaths", "\n".join(map(_event, found.deaths)) or "none since the server started"
    yield "url", found.url or ""
    if found.engine is not None:
        yield from _of_engine(found.engine)
    if found.load is not None:
        yield "load", _load(found.load)
    yield "requests", _requests(found) if found.engine is not None else ""
    yield "counts", "" if found.counts is None else _counts(found.counts)
    yield "config", "\n".join(f"{key}: {value}" for key, value in sorted(found.config.items()))
    yield "log", found.log
    yield "log errors", "\n".join(found.errors) or "none in its last lines"


def _of_engine(engine: EngineInfo) -> Iterator[Field]:
    yield "engine", f"{engine.engine}, model {engine.model}"
    yield (
        "engine size",
        f"{engine.max_model_len} tokens of context, {engine.max_num_seqs} requests at once, "
        f"{engine.kv_blocks} KV blocks of {engine.block_size} tokens",
    )
    yield "KV transfer", "yes" if engine.no_transfer is None else f"no: {engine.no_transfer}"


def _load(load: Load) -> str:
    kv = _UNKNOWN if load.kv_usage is None else f"{load.kv_usage:.0%}"
    pinned = f", {load.kv_pinned:.0%} pinned for other workers" if load.kv_pinned else ""
    return f"{_known(load.running)} running, {_known(load.waiting)} waiting, KV {kv} used{pinned}"


def _requests(found: WatcherDescription) -> str:
    if found.requests is None:
        return _UNKNOWN
    return f"{found.requests} here, {found.leaving} migrating away, {found.arriving} migrating to it"


def _counts(counts: Counts) -> str:
    named = (
        ("requests", counts.requests),
        ("prompt tokens computed", counts.prompt_tokens),
        ("tokens generated", counts.output_tokens),
        ("requests assigned", counts.assigned),
        ("requests not assigned", counts.unassigned),
        ("tokens routed", counts.routed_tokens),
        ("of them expected to be cached", counts.predicted_tokens),
        ("blocks known to be cached", counts.index_blocks),
        ("workers out of step", counts.out_of_step),
    )
    words = [f"{number} {name}" for name, number in named if number is not None]
    if counts.migrations is not None:
        words.append(f"{counts.migrations.completed} migrations done, {counts.migrations.not_completed} not")
    return ", ".join(words)


def _event(event: Event) -> str:
    return f"{date(event.time)}  {event.what}{f' ({event.why})' if event.why else ''}"


def _of_endpoint(found: EndpointDescription) -> Iterator[Field]:
    yield from facts_of(found.endpoint)
    yield "revisions", "\n".join(map(_revision, found.revisions))
    yield "processes", "\n".join(f"{short_watcher(row.watcher)} ({row.state})" for row in found.workers)
    yield "requests", _UNKNOWN if found.requests is None else f"{found.requests} in flight"
    yield "events", "\n".join(map(_event, found.events))


def _revision(revision: BoardRevision) -> str:
    takes = "takes requests" if revision.takes_requests else "takes no requests"
    adapters = ", ".join(adapter.name for adapter in revision.adapters)
    return f"{revision.revision} {takes}{f'; adapters: {adapters}' if adapters else ''}"


def _of_request(found: RequestLine) -> Iterator[Field]:
    yield "request", found.request
    yield "endpoint", found.revision
    yield "worker", short_watcher(found.worker) if found.worker else "none yet"
    yield "here for", _here(found)
    yield "frontend", short_watcher(found.frontend)
    yield "age", _span(found.age_s)
    yield "prompt", f"{found.prompt_tokens} tokens"
    yield "output", f"{found.tokens} tokens so far"
    yield "epoch", f"{found.epoch}"
    yield "remote prefill", found.prefill or "no: its worker prefills"
    yield "migrations", f"{found.migrations} so far{_under_way(found)}"
    yield "can migrate", "yes" if found.stays is None else f"no: {found.stays}"
    yield "fidelity", _fidelity(found)


def _here(found: RequestLine) -> str:
    return "" if found.epoch_age_s is None else f"{_span(found.epoch_age_s)}, since token {found.epoch_start}"


def _under_way(found: RequestLine) -> str:
    return "" if found.moving_to is None else f", one to {short_watcher(found.moving_to)} is under way"


def _fidelity(found: RequestLine) -> str:
    meanings = {
        "exact": "exact: elsewhere the same tokens follow",
        "distribution": "distribution: elsewhere tokens of the same distribution follow",
        "none": "none: it cannot continue elsewhere",
    }
    because = f" (because of {found.fidelity_because_of})" if found.fidelity_because_of else ""
    return f"{meanings.get(found.fidelity, found.fidelity)}{because}"


def _known(number: int | None) -> str:
    return _UNKNOWN if number is None else str(number)


def _span(seconds: float) -> str:
    """A time in its two largest units."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    left = int(seconds)
    words: list[str] = []
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        number, left = divmod(left, size)
        if number or words:
            words.append(f"{number} {unit}")
    return " ".join(words[:2])
