"""Messages of a frontend to a worker."""

from __future__ import annotations

import msgspec

from dynamo_local.core.codec import VERSION
from dynamo_local.core.messages.kv import Unpin


class Submit(msgspec.Struct, frozen=True, omit_defaults=True, tag="submit"):
    """Work on this request under this epoch, starting at output position `position`.

    `token_ids` is the prompt followed by the `position` tokens accepted so far. `sampling` is the engine's own
    parameter map in msgpack (for vLLM: SamplingParams by field name), with token limits already reduced by
    `position`; an engine reads the fields that it knows. What counts the output counts it from the first one on.

    `source` is the lease of a worker that has the KV of this context, or most of it, to be pulled. `hold_s` > 0: when
    the request has finished, its full blocks stay for readers until it is cancelled, at most so many seconds.

    `exclusive`: only if the worker is set apart for this request, and free.

    `adapter` names a LoRA adapter. What a name stands for is the worker's configuration, and never a client's to say.

    `reasoning_parser_kwargs` are arguments of the engine's reasoning parser, which tell it how the prompt was made, in
    msgpack. `session_id` and `trace_headers` are the client's own words for what the request belongs to.
    """

    request_id: str
    epoch: int
    frontend: str
    token_ids: list[int]
    sampling: msgspec.Raw
    position: int = 0
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: bytes | None = None
    session_id: str | None = None
    trace_headers: dict[str, str] | None = None
    source: str | None = None
    hold_s: float = 0.0
    exclusive: bool = False
    v: int = VERSION


class RequestEpoch(msgspec.Struct, frozen=True, array_like=True):
    """One assignment of one request."""

    request_id: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.epoch}"


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The frontend is done with these: it has all that it wants, or wants nothing any more.

    The worker stops, frees their KV blocks, and forgets the tokens it has kept. Unknown ones are ignored.
    """

    requests: tuple[RequestEpoch, ...]
    v: int = VERSION


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """How far the frontend has got with an epoch: it has accepted all positions below `position`."""

    request_id: str
    epoch: int
    position: int


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """The worker need not keep tokens below these positions. Sent now and then, not for every step."""

    progress: tuple[Progress, ...]
    v: int = VERSION


class Resend(msgspec.Struct, frozen=True, tag="resend"):
    """Send again everything from these positions on. Asked after a gap, and after a silence.

    The worker answers for each, at once: with the tokens, with an empty delta if there are none yet, or with a
    refusal if it does not know the epoch (the submission was lost, or this process is another one).
    """

    frontend: str
    progress: tuple[Progress, ...]
    v: int = VERSION


class AskExclusive(msgspec.Struct, frozen=True, tag="ask_exclusive"):
    """The worker is to be set apart for this request. It tells so with its presence. Said again and again until the
    request is submitted: if that ends, so does it."""

    request_id: str
    frontend: str
    v: int = VERSION


class EndExclusive(msgspec.Struct, frozen=True, tag="end_exclusive"):
    """The worker need not be set apart for this request any more."""

    request_id: str
    frontend: str
    v: int = VERSION


Work = Submit | Cancel | Ack | Resend | Unpin | AskExclusive | EndExclusive
