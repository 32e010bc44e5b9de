"""What a request has output, noted in the journal of its answer before vLLM's application gets it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from components.frontend.answers.kept_log import KeptLog
from dynamo_local.core.answers.records import MAX_PROMPT_TOKENS, KeptPrompt
from dynamo_local.core.messages.tokens import TokenDelta
from dynamo_local.core.ports import Request
from dynamo_local.core.request.fidelity import Fidelity
from dynamo_local.engine.vllm.frontend.kept_prompt import kept_prompt


class Recording:
    """The tokens of one request; `before`: those of earlier attempts. `failure`: why the request has failed."""

    def __init__(self, log: KeptLog) -> None:
        self._log = log
        self._has_begun = False
        self._vocabulary = ""
        self.before: Sequence[TokenDelta] = tuple(log.tokens)
        self.failure: TokenDelta | None = None

    def prompt(self, rendered: Sequence[int], vocabulary: str) -> Sequence[int]:
        """Return the prompt that the answer was begun with, whatever is rendered now: a chat template may print the
        time. `vocabulary`: a digest of the tokenizer's, in which alone the tokens mean the same."""
        self._vocabulary = vocabulary
        kept = self._log.prompt
        return rendered if kept is None or kept.token_ids is None else kept.token_ids

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
        digest = self._digest(request, revision)
        if self._log.prompt is None:
            token_ids = list(request.prompt_token_ids)
            self._log.note_prompt(KeptPrompt(digest, token_ids if len(token_ids) <= MAX_PROMPT_TOKENS else None))
        elif self._log.prompt.digest != digest:
            changed = "its model" if self._log.prompt.token_ids is not None else "its model or its chat template"
            return f"the answer cannot go on: {changed} has changed since it was begun"
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

    def _digest(self, request: Request, revision: str) -> str:
        content = hashlib.sha256(array("q", request.prompt_token_ids).tobytes())
        content.update(f"{revision}\n{request.adapter or ''}\n{self._vocabulary}".encode())
        return content.hexdigest()


_current: ContextVar[Recording | None] = ContextVar("recording of this answer", default=None)


@contextmanager
def recorded(recording: Recording) -> Iterator[None]:
    """Have what is submitted within recorded, also by tasks that begin there."""
    token, prompt = _current.set(recording), kept_prompt.set(recording.prompt)
    try:
        yield
    finally:
        kept_prompt.reset(prompt)
        _current.reset(token)


def current_recording() -> Recording | None:
    """The recording of the answer that this belongs to; None: it is not kept."""
    return _current.get()
