"""Two ports: what an engine offers its worker, and what the OpenAI server needs behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dynamo_local.core.fidelity import LOST, Survival
from dynamo_local.core.messages import EngineInfo, Load, RequestEpoch, Submit, TokenDelta

Progress = Callable[[str], None]
"""Told in a few words what a long start-up is doing. May be called from any thread."""


@dataclass(frozen=True)
class Step:
    """The outcome of one engine step. `timestamp` is CLOCK_MONOTONIC, in seconds."""

    timestamp: float
    deltas: tuple[TokenDelta, ...]
    load: Load | None = None


class Engine(Protocol):
    """An engine in the hands of its one worker.

    Order of calls: start, then submit, cancel and step in any order, then close. `step` has one caller.
    """

    async def start(self, progress: Progress) -> EngineInfo:
        """Load the model. Raises EngineError."""

    async def submit(self, work: Submit) -> None:
        """Take a request. Its tokens come out of `step`, stamped with its epoch and positions.

        Raises RequestError if the engine cannot take this one.
        """

    async def cancel(self, requests: Sequence[RequestEpoch]) -> None:
        """Drop requests and free their KV blocks. No token of them comes out afterwards. Unknown ones are ignored."""

    async def step(self) -> Step:
        """Wait for the next outcome. Raises EngineError once the engine is dead."""

    async def close(self, deadline_s: float) -> None:
        """End the engine and every process it started."""


@dataclass(frozen=True)
class Request:
    """A request as the OpenAI server hands it over, ready to be put to work under any epoch.

    `sampling(position)` gives the engine's parameters, in msgpack, for continuing at that output position: token
    limits are reduced by what has been accepted.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: Callable[[int], bytes]
    arrival_time: float
    priority: int = 0
    cache_salt: str | None = None
    reasoning_ended: bool | None = None
    survival: Survival = LOST
    """How its output survives a new epoch; unless somebody knows better, not at all."""


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
