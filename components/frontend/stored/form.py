"""Forms by which files are uploaded (multipart/form-data), read as they arrive."""

from __future__ import annotations

import logging

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from dynamo_local.core.errors import ConfigError

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
