"""Files and batches under /v1/files and /v1/batches, as OpenAI's clients know them: each key has its own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import BinaryIO

from components.frontend.batches.pacing import Pacer
from components.frontend.batches.run import BatchKeeper, Surroundings
from components.frontend.http.exchange import watched
from components.frontend.http.gate import Handler, HttpGate
from components.frontend.http.incoming import BodyRefusedError, read_body
from components.frontend.http.models import ModelTable
from components.frontend.http.outgoing import answer_json, page, query_of, refusal_of
from components.frontend.request_context import caller_of
from components.frontend.settings import FrontendSettings
from components.frontend.stored.upload import Uploads
from dynamo_local.core.errors import ConfigError, ItemAbsentError, StateError, UsageError
from dynamo_local.core.http.asgi import Receive, Scope, Send, headers_of
from dynamo_local.core.http.bounds.admission import AdmissionLimits, Refusal
from dynamo_local.core.http.paths import BATCHES, CONTENT, FILES
from dynamo_local.core.stored.batches import Batch, order_of
from dynamo_local.core.stored.files import BATCH, StoredFile
from dynamo_local.log_once import LogOnce
from dynamo_local.tasks import finish_in_thread
from state.paths import StatePaths
from state.stored.batches import BatchStore, new_batch_id
from state.stored.files import FileStore

_log = logging.getLogger(__name__)

SWEEP_EVERY_S = 60.0
"""Between two looks for files that have expired, in seconds."""

_MOST_LISTED = 10_000
_CHUNK_BYTES = 256 * 1024


class FilesRest:
    """Answers requests about files."""

    def __init__(self, store: FileStore, uploads: Uploads, wall_clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._uploads = uploads
        self._wall_clock = wall_clock

    async def run(self) -> None:
        """Remove what has expired, now and then, until cancelled."""
        log_once = LogOnce(_log)
        while True:
            try:
                await finish_in_thread(lambda: self._store.sweep(self._wall_clock()))
                log_once.clear()
            except StateError as error:
                log_once.warn(f"files that have expired are not removed: {error}")
            await asyncio.sleep(SWEEP_EVERY_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> Refusal | None:
        """Answer a request, or return why not. Raises ClientGoneError."""
        try:
            return await self._answer(scope, receive, send)
        except (UsageError, StateError) as error:
            return refusal_of(error)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> Refusal | None:
        owner = caller_of(scope).owner
        file_id, _, action = scope["path"].removeprefix(FILES).removeprefix("/").partition("/")
        if scope["method"] == "POST":
            stored = await self._uploads.take(scope, receive, owner)
            if isinstance(stored, Refusal):
                return stored
            await answer_json(send, stored.shown())
        elif not file_id:
            await self._list(scope, send, owner)
        elif f"/{action}" == CONTENT:
            await self._send_content(owner, file_id, receive, send)
        elif scope["method"] == "DELETE":
            await finish_in_thread(lambda: self._store.remove(owner, file_id, self._wall_clock()))
            await answer_json(send, {"id": file_id, "object": "file", "deleted": True})
        else:
            file = await finish_in_thread(lambda: self._store.find(owner, file_id, self._wall_clock()))
            await answer_json(send, file.shown())
        return None

    async def _list(self, scope: Scope, send: Send, owner: str) -> None:
        asked = query_of(scope, frozenset({"purpose", "limit", "order", "after"}))
        if (order := asked.get("order", "desc")) not in ("asc", "desc"):
            raise ConfigError(f"order must be asc or desc, got {order[:20]!r}")
        files = await finish_in_thread(lambda: self._store.listed(owner, self._wall_clock()))
        wanted = [file for file in files if asked.get("purpose", file.purpose) == file.purpose]
        wanted = wanted if order == "desc" else wanted[::-1]
        await answer_json(send, page(wanted, asked, lambda file: file.id, StoredFile.shown, _MOST_LISTED))

    async def _send_content(self, owner: str, file_id: str, receive: Receive, send: Send) -> None:
        def opened() -> tuple[StoredFile, BinaryIO]:
            file = self._store.find(owner, file_id, self._wall_clock())
            return file, self._store.open(file)

        file, content = await finish_in_thread(opened)
        try:
            headers = [(b"content-type", b"application/octet-stream"), (b"content-length", str(file.bytes).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            with watched(receive) as gone:
                while (chunk := await finish_in_thread(lambda: content.read(_CHUNK_BYTES))) and not gone.done():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            content.close()


_MOST_BATCHES_LISTED = 100


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
        return page(batches, asked, lambda batch: batch.order.id, Batch.shown, _MOST_BATCHES_LISTED)

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


class Stores:
    """The stores of one namespace, as a frontend has them. `handlers`: who answers, by the beginning of the path."""

    def __init__(self, paths: StatePaths, settings: FrontendSettings) -> None:
        self._settings = settings
        self._files = FileStore(paths, settings)
        self._batches = BatchStore(paths, self._files, settings)
        uploads = Uploads(self._files, settings.max_file_bytes, settings.body_timeout_s)
        self.files_rest = FilesRest(self._files, uploads)
        self.handlers: Mapping[str, Handler] = {
            FILES: self.files_rest,
            BATCHES: BatchesRest(self._batches, self._files, settings),
        }

    def keeper(self, gate: HttpGate, models: ModelTable) -> BatchKeeper:
        """Return what runs batches, by asking the gate."""
        settings = self._settings
        around = Surroundings(
            answer=gate.answer_own,
            models=models,
            pacer=Pacer(models, settings.max_batch_requests),
            files=self._files,
            limits=settings,
            max_body_bytes=settings.max_body_bytes,
            caller=gate.caller_for,
        )
        return BatchKeeper(self._batches, around)
