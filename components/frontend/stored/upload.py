"""Uploads: the content of a file goes to the disk as it arrives, in threads, and is never in memory as a whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from components.frontend.http.incoming import ClientGoneError
from components.frontend.stored.form import UploadForm
from dynamo_local.core.errors import ConfigError, StateError
from dynamo_local.core.http.asgi import Receive, Scope, header
from dynamo_local.core.http.bounds.admission import Refusal
from dynamo_local.core.stored.files import NAME_CHARACTERS, StoredFile, check_purpose, expiry_of
from dynamo_local.tasks import finish_in_thread
from state.stored.files import FileDescription, FileStore, NewFile

AT_ONCE = 8
"""Uploads that one frontend takes at the same time."""

_WRITE_BYTES = 1024 * 1024
_DEADLINE_S = 3600.0
_RETRY_S = 5
_FIELDS = frozenset({"purpose", "expires_after[anchor]", "expires_after[seconds]"})


class _RefusedError(Exception):
    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class Uploads:
    """Takes uploads. `silence_s`: how long a client may send nothing."""

    def __init__(
        self, store: FileStore, max_file_bytes: int, silence_s: float, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._max_file_bytes = max_file_bytes
        self._silence_s = silence_s
        self._wall_clock = wall_clock
        self._under_way = 0

    async def take(self, scope: Scope, receive: Receive, owner: str) -> StoredFile | Refusal:
        """Store the file of a request. Raises ConfigError, StorageFullError, StateError, ClientGoneError; then nothing
        of it is stored."""
        if self._under_way >= AT_ONCE:
            why = f"{AT_ONCE} uploads are under way"
            return Refusal(503, why, "ServiceUnavailableError", retry_after_s=_RETRY_S)
        self._under_way += 1
        try:
            async with asyncio.timeout(_DEADLINE_S):
                return await self._take(scope, receive, owner)
        except TimeoutError:
            why = f"nothing came for {self._silence_s:g} s (setting body-timeout-s), or not all in {_DEADLINE_S:g} s"
            return Refusal(408, why, "RequestTimeoutError")
        except _RefusedError as error:
            return error.refusal
        finally:
            self._under_way -= 1

    async def _take(self, scope: Scope, receive: Receive, owner: str) -> StoredFile:
        form = UploadForm(header(scope, b"content-type"))
        announced = header(scope, b"content-length")
        length = int(announced) if announced.isdigit() and len(announced) < 18 else 0
        # The form around the file is no part of it, and may make the body larger than the file may be.
        new = await finish_in_thread(lambda: self._store.begin(owner, max(0, length - _WRITE_BYTES)))
        kept = None
        try:
            await self._receive(form, receive, new)
            description = _described(form, owner)
            kept = await finish_in_thread(lambda: self._store.keep(new, description, self._wall_clock()))
            return kept
        finally:
            if kept is None:
                # What cannot be removed now is removed by the next sweep.
                with suppress(StateError):
                    await finish_in_thread(new.drop)

    async def _receive(self, form: UploadForm, receive: Receive, new: NewFile) -> None:
        waiting = bytearray()
        async for piece in self._pieces(receive):
            waiting += form.feed(piece)
            if new.size + len(waiting) > self._max_file_bytes:
                why = f"the file is larger than {self._max_file_bytes} bytes (setting max-file-bytes)"
                raise _RefusedError(Refusal(413, why, "BadRequestError", "file"))
            if len(waiting) >= _WRITE_BYTES:
                content = bytes(waiting)
                waiting.clear()
                await finish_in_thread(lambda content=content: new.write(content))  # type: ignore[misc]
        await finish_in_thread(lambda: new.write(bytes(waiting)))

    async def _pieces(self, receive: Receive) -> AsyncIterator[bytes]:
        more = True
        while more:
            async with asyncio.timeout(self._silence_s):
                event = await receive()
            if event["type"] != "http.request":
                raise ClientGoneError
            yield event.get("body", b"")
            more = event.get("more_body", False)


def _described(form: UploadForm, owner: str) -> FileDescription:
    """Return what a whole form says of its file. Raises ConfigError."""
    if not form.is_whole:
        raise ConfigError("the form is not whole: its last boundary is missing")
    if form.filename is None:
        raise ConfigError("the form has no file")
    if unknown := form.fields.keys() - _FIELDS:
        raise ConfigError(f"there is no field {min(unknown)[:60]!r}")
    purpose = check_purpose(form.fields.get("purpose"))
    expires = expiry_of(form.fields.get("expires_after[anchor]"), form.fields.get("expires_after[seconds]"))
    return FileDescription(owner, form.filename[:NAME_CHARACTERS], purpose, expires)
