"""Two ports: what an engine offers its worker, and what the OpenAI server needs behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dynamo_local.core.messages.kv import PinAnswer, PinQuestion
from dynamo_local.core.messages.presence import EngineInfo, Load
from dynamo_local.core.messages.tokens import TokenDelta
from dynamo_local.core.messages.work import RequestEpoch, Submit
from dynamo_local.core.request.fidelity import LOST, Survival

Progress = Callable[[str], None]
"""Told in a few words what a long start-up is doing. May be called from any thread."""


@dataclass(frozen=True)
class Step:
    """The outcome of one engine step. `timestamp` is CLOCK_MONOTONIC, in seconds."""

    timestamp: float
    deltas: tuple[TokenDelta, ...]
    load: Load | None = None


@dataclass(frozen=True)
class Prefix:
    """The part of a context whose KV engines may have: all but the last token, which is computed in any case.

    `hashes` are of its full blocks, in order, by content; `rest` are the tokens behind these. `fingerprint`: what
    engines must agree on to read each other's.
    """

    fingerprint: str
    hashes: tuple[bytes, ...]
    rest: tuple[int, ...] = ()


@dataclass(frozen=True)
class PulledPrefix:
    """What a source has pinned for this engine to read: `answer.blocks` leading blocks of `hashes`, of which the first
    `cached` were here already, and `answer.rest` of the `rest` tokens behind them."""

    pin: str
    hashes: tuple[bytes, ...]
    answer: PinAnswer
    cached: int = 0
    rest: int = 0


class Engine(Protocol):
    """An engine in the hands of its one worker.

    Order of calls: start, then the others in any order, then close. `step` has one caller.

    **Prefix pull.** KV blocks move between engines by content: a destination asks a source for the hashes of a context
    (`prefix`), the source keeps these blocks for a time (`pin`), and the destination reads those that it lacks while it
    admits the request (`submit` with `pulled`). One-sided reads cannot notice that the blocks they read have been
    reused. Therefore the source never reuses a pinned block before the pin's end, which is a time of the clock that
    all processes of a machine share, and what the destination has not read completely before that time it computes.
    """

    async def start(self, progress: Progress) -> EngineInfo:
        """Load the model. Raises EngineError."""

    async def submit(self, work: Submit, pulled: PulledPrefix | None = None) -> None:
        """Take a request. Its tokens come out of `step`, stamped with its epoch and positions.

        With `pulled`, read these blocks first; if that fails in any way, compute them. With `work.hold_s`, keep the
        full blocks when the request finishes, until it is cancelled or that time is over.

        Raises RequestError if the engine cannot take this one.
        """

    async def warm(self, work: Submit, pulled: PulledPrefix | None = None) -> None:
        """As `submit`, for a request of one token that nobody wants: its KV stays, and not only that of full blocks if
        the engine can, for others to `grow` from it, until it is cancelled. `work.hold_s`: it is by then."""

    async def grow(self, work: Submit, from_warm: RequestEpoch, *, warm: bool = False) -> bool:
        """Take a request whose context begins with that of a warm one, and which needs nothing that is not in its
        tokens. It takes over what is kept of that one, and only the rest is computed. `warm`: it is another warm one.

        False: this engine cannot, or has nothing of it. Then nothing was done.
        """

    async def cancel(self, requests: Sequence[RequestEpoch]) -> None:
        """Drop requests and free their KV blocks, held ones included. No token of them comes out afterwards. Unknown
        ones are ignored."""

    def prefix(self, token_ids: Sequence[int], cache_salt: str | None, adapter: str | None) -> Prefix | None:
        """What there is to be pulled of a context. None: this engine pulls nothing, or does not have the adapter."""

    async def cached(self, prefix: Prefix) -> int:
        """How many of the full blocks are here, from the first one on. Raises EngineError if nobody says."""

    async def pin(self, question: PinQuestion) -> PinAnswer:
        """Keep blocks for a reader. Answers when every block that it counts has really been written."""

    async def unpin(self, pins: Sequence[str]) -> None:
        """Free pins before their time. Unknown ones are ignored."""

    async def step(self) -> Step:
        """Wait for the next outcome. Raises EngineError once the engine is dead."""

    async def waited_s(self) -> float:
        """For how long its threads have waited for a core that others had, all together. Grows as long as they wait."""

    async def close(self, deadline_s: float) -> None:
        """End the engine and every process it started. These have so long for it, then they are killed."""


class Sampling(Protocol):
    """See Request."""

    def __call__(self, position: int, at_most: int | None = None) -> bytes: ...


@dataclass(frozen=True)
class Request:
    """A request as the OpenAI server hands it over, ready to be put to work under any epoch.

    `sampling(position, at_most)` gives the engine's parameters, in msgpack, for continuing at that output position:
    token limits are reduced by what has been accepted, and to `at_most` further tokens if that is given.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    arrival_time: float
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None
    """The LoRA adapter that the client has named as its model."""
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: bytes | None = None
    """Arguments of the engine's reasoning parser, in msgpack."""
    session_id: str | None = None
    """What the client says that several requests belong to."""
    trace_headers: Mapping[str, str] | None = None
    """Where the request stands in the client's traces (W3C Trace Context)."""
    survival: Survival = LOST
    """How its output survives a new epoch; unless somebody knows better, not at all."""
    max_tokens: int | None = None
    """Output positions wanted at most. None: as many as there is room for."""
    prefill_elsewhere: bool = True
    """Whether another worker may compute its prompt. Not if the prompt's own log-probabilities are wanted."""


@dataclass(frozen=True)
class Outputs:
    """Accepted tokens on their way to the OpenAI server: every position of a request exactly once, in order."""

    timestamp: float
    deltas: tuple[TokenDelta, ...]


class Dispatcher(Protocol):
    """What stands behind the OpenAI server instead of an engine: all the workers there are."""

    async def submit(self, request: Request) -> None:
        """Put a request to work. Whatever becomes of it comes out of `outputs`, failure included."""

    async def cancel(self, request_ids: Sequence[str]) -> None:
        """Forget requests, wherever they are worked on."""

    async def outputs(self) -> Outputs:
        """Wait for the next tokens. Never raises for the sake of one request."""
