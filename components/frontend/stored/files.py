"""Files under /v1/files, as OpenAI's clients know them: each key has its own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import BinaryIO

from components.frontend.http.callers import caller_of
from components.frontend.http.exchange import watched
from components.frontend.http.outgoing import answer_json, page, query_of, refusal_of
from components.frontend.stored.upload import Uploads
from dynamo_local.core.errors import ConfigError, StateError, UsageError
from dynamo_local.core.http.asgi import Receive, Scope, Send
from dynamo_local.core.http.bounds.admission import Refusal
from dynamo_local.core.http.paths import CONTENT, FILES
from dynamo_local.core.stored.files import StoredFile
from dynamo_local.log_once import LogOnce
from dynamo_local.tasks import finish_in_thread
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
