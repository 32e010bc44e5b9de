"""Batches: what is ordered, how far it is, and how both are shown. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from dynamo_local.core.errors import ConfigError
from dynamo_local.core.http.json_text import as_utf8
from dynamo_local.core.stored.files import expiry_of

BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")
"""What the id of a batch looks like, whole. It is the name of a folder as well."""

BATCH_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
"""Paths that lines may ask."""

BATCH_PRIORITY = 1000
"""Priority of lines: behind what people call background work."""

MOST_ERRORS = 50
"""Wrong lines that are told of. What comes behind them is not looked at."""

WAKE = "wake"
"""Key of the metadata that says, with "true", whether the batch wakes endpoints that are parked or asleep."""

KEPT_S = 30 * 24 * 3600
"""For which an ended batch is kept."""

_HOUR_S = 3600
_LEAST_WINDOW_S, _MOST_WINDOW_S = _HOUR_S, 30 * 24 * _HOUR_S
_WINDOW = re.compile(r"([1-9][0-9]{0,3})([hd])")
_METADATA_ENTRIES, _METADATA_KEY, _METADATA_VALUE = 16, 64, 512

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]

ENDED = frozenset[Status]({"failed", "completed", "expired", "cancelled"})


@dataclass(frozen=True)
class BatchLimits:
    """Bounds on batches, and on how they are run."""

    max_batch_lines: int = field(default=50_000, metadata={"help": "Maximum number of lines of a batch."})
    max_batches: int = field(default=100, metadata={"help": "Maximum number of batches of each key under way."})
    max_batch_requests: int = field(
        default=256, metadata={"help": "Maximum number of lines of batches in flight for each model in a frontend."}
    )
    batches_wake: bool = field(
        default=False,
        metadata={"help": "Whether batches wake endpoints that are parked or asleep, unless their metadata says so."},
    )


class LineError(msgspec.Struct, frozen=True):
    """What is wrong with a batch, or with a line of it; lines are counted from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchOrder(msgspec.Struct, frozen=True):
    """What is ordered. `owner`: as `Caller.owner` has it. Times in whole seconds since 1970; `output_expires_after_s`
    counts from the moment at which an output file is stored."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output_expires_after_s: int
    metadata: dict[str, str] | None = None

    def wakes(self, by_default: bool) -> bool:
        """Whether endpoints are woken for the batch."""
        asked = (self.metadata or {}).get(WAKE)
        return by_default if asked is None else asked == "true"


class BatchUsage(msgspec.Struct, frozen=True):
    """Tokens that the answers of lines tell of. `cached` of the `input` tokens were in a KV cache, `reasoning` of the
    `output` tokens were thought."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def __add__(self, other: BatchUsage) -> BatchUsage:
        return BatchUsage(
            self.input + other.input,
            self.cached + other.cached,
            self.output + other.output,
            self.reasoning + other.reasoning,
        )

    def shown(self) -> dict[str, Any]:
        """Return it as OpenAI's clients know it."""
        return {
            "input_tokens": self.input,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.output,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.input + self.output,
        }


class BatchState(msgspec.Struct, frozen=True):
    """How far a batch is. The numbers of lines are exact when it has ended, and lag a little before."""

    status: Status = "validating"
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: BatchUsage = BatchUsage()
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: tuple[LineError, ...] = ()
    ends_as: Status | None = None
    """What a batch that is being finalized will have become."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing of the batch happens any more."""
        return self.status in ENDED

    def ended_at(self) -> int | None:
        """When the batch ended."""
        return self.failed_at or self.completed_at or self.expired_at or self.cancelled_at


class Batch(msgspec.Struct, frozen=True):
    """A batch. `cancelling_at`: when it was cancelled; None: it was not."""

    order: BatchOrder
    state: BatchState
    cancelling_at: int | None = None

    @property
    def status(self) -> Status:
        """The status as it is shown."""
        is_cancelling = self.cancelling_at is not None and self.state.status in ("validating", "in_progress")
        return "cancelling" if is_cancelling else self.state.status

    def shown(self) -> dict[str, Any]:
        """Return the batch as OpenAI's clients know one."""
        state, order = self.state, msgspec.structs.asdict(self.order)
        del order["owner"], order["output_expires_after_s"]
        moments = {name: value for name, value in msgspec.structs.asdict(state).items() if name.endswith("_at")}
        errors = {"object": "list", "data": list(state.errors)} if state.errors else None
        return {
            "object": "batch",
            **order,
            **moments,
            "status": self.status,
            "cancelling_at": self.cancelling_at,
            "output_file_id": state.output_file_id,
            "error_file_id": state.error_file_id,
            "errors": errors,
            "usage": state.usage.shown(),
            "request_counts": {"total": state.total, "completed": state.completed, "failed": state.failed},
        }


class _Expiry(msgspec.Struct, forbid_unknown_fields=True):
    anchor: str | None = None
    seconds: int | None = None


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    """The body of an order, as clients send it."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: _Expiry | None = None


def order_of(body: bytes, batch_id: str, owner: str, now: float) -> BatchOrder:
    """Return the order that a client's request stands for. Raises ConfigError."""
    try:
        asked = msgspec.json.decode(as_utf8(body), type=_Asked)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"the order of a batch cannot be read: {error}") from error
    if asked.endpoint not in BATCH_ENDPOINTS:
        raise ConfigError(f"endpoint must be one of {', '.join(BATCH_ENDPOINTS)}, got {asked.endpoint[:60]!r}")
    expires = asked.output_expires_after or _Expiry()
    return BatchOrder(
        batch_id,
        owner,
        asked.endpoint,
        asked.input_file_id,
        asked.completion_window,
        int(now),
        int(now) + _window_s(asked.completion_window),
        expiry_of(expires.anchor, expires.seconds),
        _checked(asked.metadata),
    )


def _window_s(text: str) -> int:
    found = _WINDOW.fullmatch(text)
    seconds = 0 if found is None else int(found[1]) * (_HOUR_S if found[2] == "h" else 24 * _HOUR_S)
    if not _LEAST_WINDOW_S <= seconds <= _MOST_WINDOW_S:
        raise ConfigError(f"completion_window must be from 1h to 30d, such as 24h, got {text[:20]!r}")
    return seconds


def _checked(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    if metadata is None:
        return None
    if len(metadata) > _METADATA_ENTRIES:
        raise ConfigError(f"metadata has at most {_METADATA_ENTRIES} entries, got {len(metadata)}")
    for key, value in metadata.items():
        if len(key) > _METADATA_KEY or len(value) > _METADATA_VALUE:
            raise ConfigError(f"keys of metadata have at most {_METADATA_KEY} characters, values {_METADATA_VALUE}")
    if metadata.get(WAKE, "true") not in ("true", "false"):
        raise ConfigError(f"{WAKE} in metadata must be true or false")
    return dict(metadata)


# How many lines of batches may be in flight for a model: many while nobody else asks it, else few. Pure.
#
# The window grows while it is used up, and no request waits at the engines. It shrinks to the least as soon as a
# request of people runs or waits: those lines that are in flight then finish, behind them, by the engines' own
# scheduling.

LEAST = 1
"""Lines in flight for a model while people ask it, for each worker."""

_GROWTH = 2.0
_KV_FULL = 0.85


@dataclass(frozen=True)
class Room:
    """A model as a frontend sees it. `people`: their requests, which run or wait. `waiting`: requests that wait at
    engines, of whichever class. `kv_usage`: the highest of a worker, 0 to 1. `slots`: requests that all engines run at
    the same time. `frontends`: those that serve it."""

    workers: int
    slots: int
    people: int
    waiting: int
    kv_usage: float
    frontends: int = 1


def next_window(window: int, in_flight: int, room: Room, most: int) -> int:
    """Return how many lines may be in flight, given how many could be and are."""
    least = min(LEAST * room.workers, most)
    if not room.workers:
        return 0
    if room.people:
        return least
    top = max(least, min(most, room.slots))
    if room.waiting or room.kv_usage >= _KV_FULL:
        return max(least, min(window, in_flight, top) * 3 // 4)
    wanted = int(max(window, least) * _GROWTH) if in_flight >= window else window
    return max(least, min(wanted, top))
