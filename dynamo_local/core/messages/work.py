"""Messages from frontends to workers: submissions, acknowledgements, cancellations."""

from __future__ import annotations

import msgspec

from dynamo_local.core.codec import Message
from dynamo_local.core.messages.kv import Unpin


class Submit(Message, frozen=True, omit_defaults=True, tag="submit"):
    """Order to work on a request under this epoch, from output position `position` on.

    `token_ids` is the prompt followed by the `position` tokens accepted so far. `sampling` is the engine's own
    parameter map in msgpack (for vLLM: SamplingParams by field name), with token limits already reduced by
    `position`; an engine reads the fields that it knows. Parameters that depend on the number of output tokens count
    from position 0.

    `source` is the lease of a worker from which the KV of this context, or most of it, can be pulled. `hold_s` > 0: the
    full blocks of the finished request are kept for readers until it is cancelled, at most so many seconds.

    `key`: the API key that the request came with, for fairness among keys; empty: none.

    `pools`: the pooled output of the prompt is wanted, and no token. `sampling` then has the engine's pooling
    parameters.

    `exclusive`: take the request only if the worker is set apart for it, and free.

    `adapter` names a LoRA adapter. Which files a name stands for is configured at the worker, never by a client.

    `reasoning_parser_kwargs` are arguments of the engine's reasoning parser, about how the prompt was made, in msgpack.
    `session_id` and `trace_headers` come from the client, and say to what the request belongs.
    """

    request_id: str
    epoch: int
    frontend: str
    token_ids: list[int]
    sampling: msgspec.Raw
    position: int = 0
    arrival_time: float = 0.0
    priority: int = 0
    key: str = ""
    cache_salt: str | None = None
    adapter: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: bytes | None = None
    session_id: str | None = None
    trace_headers: dict[str, str] | None = None
    source: str | None = None
    hold_s: float = 0.0
    exclusive: bool = False
    pools: bool = False


class RequestEpoch(msgspec.Struct, frozen=True, array_like=True):
    """The name of one assignment of a request to a worker."""

    request_id: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.epoch}"


class Cancel(Message, frozen=True, tag="cancel"):
    """The frontend has finished or cancelled these requests.

    The worker stops them, frees their KV blocks, and drops the tokens that it has kept. Unknown requests are ignored.
    """

    requests: tuple[RequestEpoch, ...]


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """Position of a frontend in an epoch: it has accepted all positions below `position`."""

    request_id: str
    epoch: int
    position: int


class Ack(Message, frozen=True, tag="ack"):
    """The worker may drop its tokens below these positions. Sent at intervals, not for every step."""

    progress: tuple[Progress, ...]


class Resend(Message, frozen=True, tag="resend"):
    """Order to send all tokens from these positions on again, after a gap or a silence.

    The worker sends a delta for each at once: with the tokens, empty if there are none yet, or a refusal if it does not
    know the epoch (the submission was lost, or this is another process).
    """

    frontend: str
    progress: tuple[Progress, ...]


class AskExclusive(Message, frozen=True, tag="ask_exclusive"):
    """Order to set the worker apart for this request; the worker confirms with its presence. Repeated until the request
    is submitted; without repetition the state ends."""

    request_id: str
    frontend: str


class EndExclusive(Message, frozen=True, tag="end_exclusive"):
    """Order to take other requests again."""

    request_id: str
    frontend: str


Work = Submit | Cancel | Ack | Resend | Unpin | AskExclusive | EndExclusive
