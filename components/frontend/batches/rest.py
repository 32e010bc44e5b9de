"""Batches under /v1/batches, as OpenAI's clients know them: each key has its own."""

from __future__ import annotations

import time
from collections.abc import Callable

from components.frontend.http.callers import caller_of
from components.frontend.http.incoming import BodyRefusedError, read_body
from components.frontend.http.outgoing import answer_json, page, query_of, refusal_of
from dynamo_local.core.errors import ConfigError, ItemAbsentError, StateError, UsageError
from dynamo_local.core.http.asgi import Receive, Scope, Send, headers_of
from dynamo_local.core.http.bounds.admission import AdmissionLimits, Refusal
from dynamo_local.core.http.paths import BATCHES
from dynamo_local.core.stored.batches import Batch, order_of
from dynamo_local.core.stored.files import BATCH
from dynamo_local.tasks import finish_in_thread
from state.stored.batches import BatchStore, new_batch_id
from state.stored.files import FileStore

_MOST_LISTED = 100


class BatchesRest:
    """Answers requests about batches."""

    def __init__(
        self,
        store: BatchStore,
        files: FileStore,
        limits: AdmissionLimits,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._files = files
        self._limits = limits
        self._wall_clock = wall_clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> Refusal | None:
        """Answer a request, or return why not. Raises ClientGoneError."""
        try:
            await answer_json(send, await self._answer(scope, receive))
        except BodyRefusedError as error:
            return error.refusal
        except (UsageError, StateError) as error:
            return refusal_of(error)
        return None

    async def _answer(self, scope: Scope, receive: Receive) -> object:
        owner = caller_of(scope).owner
        batch_id, _, action = scope["path"].removeprefix(BATCHES).removeprefix("/").partition("/")
        if action:
            return (await finish_in_thread(lambda: self._store.cancel(owner, batch_id, self._wall_clock()))).shown()
        if batch_id:
            return (await finish_in_thread(lambda: self._store.find(owner, batch_id))).shown()
        if scope["method"] == "POST":
            body = await read_body(headers_of(scope), receive, self._limits)
            return (await finish_in_thread(lambda: self._create(owner, body))).shown()
        asked = query_of(scope, frozenset({"limit", "after"}))
        batches = await finish_in_thread(lambda: self._store.listed(owner))
        return page(batches, asked, lambda batch: batch.order.id, Batch.shown, _MOST_LISTED)

    def _create(self, owner: str, body: bytes) -> Batch:
        now = self._wall_clock()
        order = order_of(body, new_batch_id(), owner, now)
        try:
            file = self._files.find(owner, order.input_file_id, now)
        except ItemAbsentError as error:
            raise ConfigError(f"input_file_id: {error.cause}") from error
        if file.purpose != BATCH:
            raise ConfigError(f"input_file_id: {file.id} has the purpose {file.purpose}; a batch needs {BATCH}")
        return self._store.create(order, file)
