"""Uploads: the content of a file goes to the disk as it arrives, in threads, and is never in memory as a whole."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from components.frontend.http.incoming import ClientGoneError
from dynamo_local.core.errors import ConfigError, StateError
from dynamo_local.core.http.asgi import Receive, Scope, header
from dynamo_local.core.http.bounds.admission import Refusal
from dynamo_local.core.stored.files import NAME_CHARACTERS, StoredFile, check_purpose, expiry_of
from dynamo_local.tasks import finish_in_thread
from state.stored.files import FileDescription, FileStore, NewFile

# Forms by which files are uploaded (multipart/form-data), read as they arrive.

_FILE = "file"
_MOST_PARTS = 16
_FIELD_BYTES = 1024

# It warns of each form that it refuses, of which the client is told.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


class UploadForm:
    """A form with one file and fields. Bounded, whatever is sent: all but the file, which is given out as it comes.

    `fields`: of the parts that have come. `filename`: None until the file has begun.
    """

    def __init__(self, content_type: bytes) -> None:
        """Raises ConfigError if the body is no such form."""
        kind, options = parse_options_header(content_type.decode("latin-1"))
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            raise ConfigError("a file is uploaded as multipart/form-data, with the fields file and purpose")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.is_whole = False
        self._parts = 0
        self._header = [b"", b""]
        self._name = ""
        self._value = bytearray()
        self._content = bytearray()
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_field": lambda data, start, end: self._add_to_header(0, data[start:end]),
                    "on_header_value": lambda data, start, end: self._add_to_header(1, data[start:end]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": lambda data, start, end: self._add(data[start:end]),
                    "on_part_end": self._end,
                    "on_end": self._end_all,
                },
            )
        except FormParserError as error:
            raise ConfigError(f"the form cannot be read: {error}") from error

    def feed(self, data: bytes) -> bytes:
        """Take a piece of the body. Returns what it has of the file. Raises ConfigError."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise ConfigError(f"the form cannot be read: {error}") from error
        content = bytes(self._content)
        self._content.clear()
        return content

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise ConfigError(f"a form has at most {_MOST_PARTS} parts")
        self._name, self._value = "", bytearray()

    def _add_to_header(self, which: int, data: bytes) -> None:
        self._header[which] += data

    def _end_header(self) -> None:
        (name, value), self._header = self._header, [b"", b""]
        if name.lower() == b"content-disposition":
            _, options = parse_options_header(value.decode("latin-1"))
            self._name = options.get(b"name", b"").decode("utf-8", "replace")
            if self._name == _FILE:
                self._note_file(options.get(b"filename", b"").decode("utf-8", "replace"))

    def _note_file(self, filename: str) -> None:
        if self.filename is not None:
            raise ConfigError("a form has one file")
        self.filename = filename or "upload"

    def _end_headers(self) -> None:
        if not self._name:
            raise ConfigError("a part of the form has no name")

    def _add(self, data: bytes) -> None:
        if self._name == _FILE:
            self._content += data
            return
        self._value += data
        if len(self._value) > _FIELD_BYTES:
            raise ConfigError(f"{self._name[:60]} is longer than {_FIELD_BYTES} bytes")

    def _end(self) -> None:
        if self._name != _FILE:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end_all(self) -> None:
        self.is_whole = True


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
