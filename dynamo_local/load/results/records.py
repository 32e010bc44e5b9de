"""What became of each request, and the latencies that follow from it."""

from __future__ import annotations

import itertools

import msgspec

NOT_SENT = "not sent"
CUT_OFF = "cut off"


class Record(msgspec.Struct):
    """One request. Times are seconds since the start of the load."""

    at_s: float
    """When it was to be sent."""
    input_tokens: int
    """Asked for; with text it is words."""
    output_tokens: int
    """Asked for."""
    sent_s: float | None = None
    """When it was sent, a new connection's set-up included; None if it never was."""
    chunks_s: list[float] = msgspec.field(default_factory=list)
    """When each chunk with tokens arrived. A server may put several tokens into one."""
    ended_s: float | None = None
    """When the answer was complete, or failed."""
    tokens: int = 0
    """Of the answer: as the server counts them, or else its chunks."""
    prompt_tokens: int | None = None
    """As the server counts them, if it does."""
    error: str = ""
    """Kind of the failure, for counting; empty if there was none."""
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
        """How much later than planned it was sent: the generator's fault, never the server's."""
        return None if self.sent_s is None else self.sent_s - self.at_s

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token, from the sending."""
        return self.chunks_s[0] - self.sent_s if self.chunks_s and self.sent_s is not None else None

    @property
    def e2e_s(self) -> float | None:
        """From the sending to the end of the answer."""
        return None if self.ended_s is None or self.sent_s is None else self.ended_s - self.sent_s

    @property
    def itl_s(self) -> float | None:
        """Time from token to token, the mean over this answer; None with fewer than two tokens."""
        if self.tokens < 2 or not self.chunks_s:
            return None
        return (self.chunks_s[-1] - self.chunks_s[0]) / (self.tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Each silence between two chunks: what a reader of the stream sees."""
        return [later - earlier for earlier, later in itertools.pairwise(self.chunks_s)]


class Completion(Record):
    """One completion by itself, of which the tokens are kept if the server tells them (`return_token_ids`)."""

    # Not planned: known when it is sent.
    at_s: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    token_ids: list[int] = msgspec.field(default_factory=list)
