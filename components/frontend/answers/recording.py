"""What a request has output, noted in the journal of its answer before vLLM's application gets it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from components.frontend.answers.kept_log import KeptLog
from dynamo_local.core.messages.tokens import TokenDelta
from dynamo_local.core.ports import Request
from dynamo_local.core.request.fidelity import Fidelity


class Recording:
    """The tokens of one request; `before`: those of earlier attempts. `failure`: why the request has failed."""

    def __init__(self, log: KeptLog) -> None:
        self._log = log
        self._has_begun = False
        self.before: Sequence[TokenDelta] = tuple(log.tokens)
        self.failure: TokenDelta | None = None

    def begin(self, request: Request, revision: str) -> str | None:
        """Begin with the request that the application has made. Returns why it cannot be continued, if so.

        `revision`: of the endpoint that serves it.
        """
        why = self._begin(request, revision)
        if why is not None:
            self.failure = TokenDelta(request.request_id, 0, 0, [], finish="error", error=why, fault="request")
        return why

    def _begin(self, request: Request, revision: str) -> str | None:
        if self._has_begun:
            return "an answer that is kept cannot call tools of the server"
        self._has_begun = True
        prompt = _digest(request, revision)
        if self._log.prompt is None:
            self._log.note_prompt(prompt)
        elif self._log.prompt != prompt:
            return "the answer cannot go on: its model or its chat template has changed since it was begun"
        if self.before and request.survival.fidelity is Fidelity.NONE:
            lost = request.survival.because_of or "its sampling"
            return f"the answer cannot go on after a restart: the state of {lost} is lost"
        return None

    def take(self, delta: TokenDelta) -> None:
        """Take tokens that the request's log has accepted, or its failure."""
        if delta.finish == "error":
            self.failure = delta
        else:
            self._log.note_tokens(delta)


def _digest(request: Request, revision: str) -> str:
    content = hashlib.sha256(array("q", request.prompt_token_ids).tobytes())
    content.update(f"{revision}\n{request.adapter or ''}".encode())
    return content.hexdigest()


_current: ContextVar[Recording | None] = ContextVar("recording of this answer", default=None)


@contextmanager
def recorded(recording: Recording) -> Iterator[None]:
    """Have what is submitted within recorded, also by tasks that begin there."""
    token = _current.set(recording)
    try:
        yield
    finally:
        _current.reset(token)


def current_recording() -> Recording | None:
    """The recording of the answer that this belongs to; None: it is not kept."""
    return _current.get()
