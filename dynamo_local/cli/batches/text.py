"""Batches as text. Pure, apart from the local time zone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from dynamo_local.cli.output.console import date, facts, table
from dynamo_local.core.keys.values import name_in
from dynamo_local.core.stored.batches import Batch

_HEADERS = ("BATCH", "STATUS", "DONE", "FAILED", "LINES", "OWNER", "CREATED")


def batches_as_json(batches: Sequence[Batch]) -> str:
    """Return batches as indented JSON."""
    return _indented([_plain(batch) for batch in batches])


def batch_as_json(batch: Batch) -> str:
    """Return a batch as indented JSON."""
    return _indented(_plain(batch))


def table_of_batches(batches: Sequence[Batch]) -> str:
    """Return a line for each batch."""
    return table(_HEADERS, [_cells(batch) for batch in batches]) if batches else "there are no batches"


def description_of_batch(batch: Batch) -> str:
    """Return what is known of a batch, a line for each fact."""
    return facts(_facts(batch))


def _cells(batch: Batch) -> tuple[str, ...]:
    state, order = batch.state, batch.order
    numbers = (state.completed, state.failed, state.total)
    return order.id, batch.status, *map(str, numbers), _owner(batch), date(order.created_at)


def _facts(batch: Batch) -> Iterator[tuple[str, str]]:
    state, order = batch.state, batch.order
    yield "batch", order.id
    yield "status", batch.status
    yield "lines", f"{state.total}: {state.completed} answered, {state.failed} failed"
    yield "path", order.endpoint
    yield "owner", _owner(batch)
    yield "created", date(order.created_at)
    ended = state.ended_at()
    yield "ended", "" if ended is None else date(ended)
    yield "expires", "" if state.has_ended else date(order.expires_at)
    yield "input", order.input_file_id
    yield "output", state.output_file_id or ""
    yield "errors", state.error_file_id or ""
    yield "wrong", "\n".join(error.message for error in state.errors)


def _owner(batch: Batch) -> str:
    """The name of the key; a dash without keys."""
    return name_in(batch.order.owner) or "-"


def _plain(batch: Batch) -> dict[str, Any]:
    return {**batch.shown(), "owner": _owner(batch)}


def _indented(plain: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(plain), indent=2).decode()
