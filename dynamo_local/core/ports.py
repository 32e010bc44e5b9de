"""The ports between packages: an engine for its worker, a dispatcher for the OpenAI server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from dynamo_local.core.messages.kv import PinAnswer, PinQuestion
from dynamo_local.core.messages.presence import EngineInfo, Load
from dynamo_local.core.messages.work import RequestEpoch, Submit, TokenDelta
from dynamo_local.core.request.recovery import LOST, Survival

Progress = Callable[[str], None]
"""Called with a few words about the stage of a long start-up, from any thread."""


@dataclass(frozen=True)
class CacheChanges:
    """What has become of an engine's cached blocks, by their keys, packed (core/routing/caches/index.py).

    First `cleared`, which forgets all of them, then `removed`, then `stored`. A key is in one of the two at most.
    """

    removed: bytes = b""
    stored: bytes = b""
    cleared: bool = False


@dataclass(frozen=True)
class Step:
    """The outcome of one engine step. `timestamp` is CLOCK_MONOTONIC, in seconds.

    `cache`: what has become of cached blocks since the step before, or since the start; None: nothing, or the engine
    tells nothing of it (`EngineInfo.kv_events`). An engine whose cache is reset says so by a step without deltas.
    """

    timestamp: float
    deltas: tuple[TokenDelta, ...]
    load: Load | None = None
    cache: CacheChanges | None = None


@dataclass(frozen=True)
class Prefix:
    """The part of a context whose KV may be cached: all but the last token, which is computed in any case.

    `hashes` are those of its full blocks, in order, by content; `rest` are the tokens behind these. `fingerprint`:
    engines read KV from each other only if theirs are equal.
    """

    fingerprint: str
    hashes: tuple[bytes, ...]
    rest: tuple[int, ...] = ()


@dataclass(frozen=True)
class PulledPrefix:
    """Blocks that a source has pinned for this engine: `answer.blocks` leading blocks of `hashes`, of which this engine
    has the first `cached`, and `answer.rest` of the `rest` tokens behind them."""

    pin: str
    hashes: tuple[bytes, ...]
    answer: PinAnswer
    cached: int = 0
    rest: int = 0
    to_confirm: bool = False
    """The source is on another machine. What is read counts once `Engine.settle_read` says that the pin was held, and
    `answer.until` is a moment of this machine's clock, at which the reader gives up."""


class Engine(Protocol):
    """An engine, used by one worker.

    Order of calls: start, then the others in any order, then close. `step` has one caller.

    **Prefix pull.** KV blocks are copied between engines by content: a destination asks a source for the hashes of a
    context (`prefix`), the source keeps these blocks for a time (`pin`), and the destination reads those that it lacks
    while it admits the request (`submit` with `pulled`). A one-sided read cannot notice that the block has been reused.
    Therefore the source never reuses a pinned block before the pin's end, a time of the clock that all processes of a
    machine share; and the destination computes the blocks that it has not read completely before that time.
    """

    async def start(self, progress: Progress) -> EngineInfo:
        """Load the model. Raises EngineError."""

    async def submit(self, work: Submit, pulled: PulledPrefix | None = None) -> None:
        """Take a request. `step` returns its tokens, with its epoch and positions.

        With `pulled`, read these blocks first; if that fails in any way, compute them. With `work.hold_s`, keep the
        full blocks of the finished request until it is cancelled or that time is over.

        Raises RequestError if the engine cannot take the request.
        """

    async def warm(self, work: Submit, pulled: PulledPrefix | None = None) -> None:
        """Take a request of one token for the sake of its KV, from which others `grow`; no client gets the token. The
        KV is kept until the request is cancelled, which happens within `work.hold_s`; that behind the full blocks as
        well, if the engine can."""

    async def grow(self, work: Submit, from_warm: RequestEpoch, *, warm: bool = False) -> bool:
        """Take a request whose context begins with that of a warm request, and which depends on nothing but its tokens.
        It takes over the KV kept for that one, and only the rest is computed. `warm`: it is itself a warm request.

        Returns False if the engine cannot do this, or has no such KV; then nothing was done.
        """

    async def cancel(self, requests: Sequence[RequestEpoch]) -> None:
        """Drop requests and free their KV blocks, held ones included. No token of them comes out afterwards. Unknown
        ones are ignored."""

    def prefix(self, token_ids: Sequence[int], cache_salt: str | None, adapter: str | None) -> Prefix | None:
        """The part of a context that could be pulled. None: this engine pulls no KV, or does not have the adapter."""

    async def cached(self, prefix: Prefix) -> int:
        """Number of leading full blocks that are cached. Raises EngineError if the engine does not answer."""

    async def pin(self, question: PinQuestion) -> PinAnswer:
        """Keep blocks for a reader. Returns when each block of the answer has really been written."""

    async def unpin(self, pins: Sequence[str]) -> None:
        """End pins before their time. Unknown pins are ignored."""

    async def confirm(self, pin: str) -> bool:
        """Release a pin. Returns whether it was held: none of its blocks has been reused so far."""

    async def read_ended(self, pin: str) -> bool:
        """Wait until everything that is to be read under a pin `to_confirm` has been read. False: it is not read, or
        its read has been settled."""

    async def settle_read(self, pin: str, *, held: bool) -> None:
        """Have what was read under a pin `to_confirm` count, or be computed. `held`: the source has confirmed the pin
        after `read_ended` was true. A pin that is settled or not known is ignored."""

    async def step(self) -> Step:
        """Wait for the outcome of the next step. Raises EngineError once the engine is dead."""

    async def park(self, deadline_s: float) -> None:
        """Empty the KV cache, and give its memory back to the system; on GPUs, move the weights to the host's memory.
        Afterwards the engine uses no CPU. Until `wake`, nothing but `step`, `waited_s`, `wake` and `close` is called.

        Raises EngineError if requests are under way, if blocks are kept for readers, or if that takes longer than
        `deadline_s`. Then the engine is as it was, or `wake` makes it so.
        """

    async def wake(self, deadline_s: float) -> None:
        """Take requests again. Changes nothing if the engine is not parked. Raises EngineError if it cannot."""

    async def waited_s(self) -> float:
        """Total time for which the engine's threads have waited for a core, in seconds. Grows while they wait."""

    async def close(self, deadline_s: float) -> None:
        """End the engine and all its processes, which are killed if they have not ended within `deadline_s`."""


class Sampling(Protocol):
    """See Request."""

    def __call__(self, position: int, at_most: int | None = None) -> bytes: ...


class ContextHashes(Protocol):
    """See Request."""

    def __call__(self, token_ids: Sequence[int], block_size: int) -> list[bytes]: ...


class Request(msgspec.Struct, frozen=True):
    """A request as the OpenAI server hands it over, ready to be submitted under any epoch.

    `sampling(position, at_most)` returns the engine's parameters, in msgpack, for continuing at that output position:
    token limits are reduced by what has been accepted, and to `at_most` further tokens if that is given.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    arrival_time: float
    priority: int = 0
    key: str = ""
    """The API key that it came with, by its name; empty: none."""
    cache_salt: str | None = None
    adapter: str | None = None
    """The LoRA adapter that the client has named as the model."""
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: bytes | None = None
    """Arguments of the engine's reasoning parser, in msgpack."""
    session_id: str | None = None
    """The client's name for a group of requests."""
    trace_headers: Mapping[str, str] | None = None
    """The request's place in the client's traces (W3C Trace Context)."""
    survival: Survival = LOST
    """How the output survives a new epoch; by default, not at all."""
    max_tokens: int | None = None
    """Largest number of output positions. None: as many as there is room for."""
    pools: bool = False
    """Whether the pooled output of the prompt is wanted, and no token. `sampling` then returns the engine's pooling
    parameters, whatever the position."""
    prefill_elsewhere: bool = True
    """Whether a prefill worker may compute the prompt. False if log-probabilities of the prompt are wanted,
    or its pooled output."""
    hashes: ContextHashes | None = None
    """Returns the hashes of the full blocks of a context that begins with the prompt, as vLLM's engines make them.
    None: engines are not to look whether they have any of it cached."""


@dataclass(frozen=True)
class Outputs:
    """Accepted tokens for the OpenAI server: each position of a request exactly once, in order."""

    timestamp: float
    deltas: tuple[TokenDelta, ...]


class Dispatcher(Protocol):
    """Stands behind the OpenAI server in place of an engine, and gives its requests to the workers."""

    async def submit(self, request: Request) -> None:
        """Take a request. Its tokens, and its failure, come out of `outputs`."""

    async def cancel(self, request_ids: Sequence[str]) -> None:
        """Cancel requests, whichever worker has them."""

    async def outputs(self) -> Outputs:
        """Wait for the next tokens. The failure of a request is an output, not an exception."""
