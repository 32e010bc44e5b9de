"""The record of a request: its times and tokens, and the latencies that follow from them."""

from __future__ import annotations

import itertools

import msgspec

NOT_SENT = "not sent"
CUT_OFF = "cut off"


class Record(msgspec.Struct):
    """The record of a request. Times are seconds since the start of the load."""

    at_s: float
    """Planned time of sending."""
    input_tokens: int
    """Length of the prompt; in words if prompts are text."""
    output_tokens: int
    """Requested length of the answer."""
    sent_s: float | None = None
    """Time of sending, before a new connection is set up; None if the request was not sent."""
    chunks_s: list[float] = msgspec.field(default_factory=list)
    """Time of arrival of each chunk with tokens. A chunk may have several tokens."""
    ended_s: float | None = None
    """Time at which the answer was complete, or failed."""
    tokens: int = 0
    """Length of the answer by the server's count, or else the number of chunks."""
    prompt_tokens: int | None = None
    """Length of the prompt by the server's count, if there is one."""
    error: str = ""
    """Kind of the failure; empty if there was none."""
    detail: str = ""
    """The failure in words."""

    @property
    def failure(self) -> str:
        """The kind of the failure and the failure in words; empty if there was none."""
        return f"{self.error}: {self.detail}" if self.error else ""

    @property
    def is_completed(self) -> bool:
        return self.ended_s is not None and not self.error

    @property
    def is_failed(self) -> bool:
        return bool(self.error) and self.error != CUT_OFF

    @property
    def lag_s(self) -> float | None:
        """Delay of the sending against its plan, caused by the generator and not by the server."""
        return None if self.sent_s is None else self.sent_s - self.at_s

    @property
    def ttft_s(self) -> float | None:
        """Time from the sending to the first token."""
        return self.chunks_s[0] - self.sent_s if self.chunks_s and self.sent_s is not None else None

    @property
    def e2e_s(self) -> float | None:
        """Time from the sending to the end of the answer."""
        return None if self.ended_s is None or self.sent_s is None else self.ended_s - self.sent_s

    @property
    def itl_s(self) -> float | None:
        """Mean time from token to token of this answer; None with fewer than two tokens."""
        if self.tokens < 2 or not self.chunks_s:
            return None
        return (self.chunks_s[-1] - self.chunks_s[0]) / (self.tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between consecutive chunks, as a reader of the stream sees them."""
        return [later - earlier for earlier, later in itertools.pairwise(self.chunks_s)]


class Completion(Record):
    """A completion whose token ids are kept, if the server returns them (`return_token_ids`)."""

    # Not planned: known when it is sent.
    at_s: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    token_ids: list[int] = msgspec.field(default_factory=list)
