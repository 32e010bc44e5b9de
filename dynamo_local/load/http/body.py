"""The wire format of an answer: HTTP/1.1 heads and bodies (RFC 9112), and server-sent events in them."""

from __future__ import annotations

import re
from dataclasses import dataclass

_END_OF_EVENT = re.compile(rb"\r?\n\r?\n")
MAX_HEAD_BYTES = 64 * 1024
_MAX_CHUNK_HEAD_BYTES = 4096


@dataclass(frozen=True)
class Head:
    """The fields of an answer's head that describe its body."""

    status: int
    length: int | None
    """Length of the body in bytes, if the head has it."""
    chunked: bool
    keeps_alive: bool

    @property
    def ends_with_connection(self) -> bool:
        return not self.chunked and self.length is None


def parse_head(raw: bytes) -> Head:
    """Parse the head of an answer. Raises ValueError."""
    status_line, *lines = raw.decode("latin-1").split("\r\n")
    version, _, rest = status_line.partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
        raise ValueError(f"not HTTP/1.1: {status_line[:60]!r}")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    connection = headers.get("connection", "").lower()
    chunked = "chunked" in headers.get("transfer-encoding", "").lower()
    length = None if chunked or "content-length" not in headers else int(headers["content-length"])
    if int(rest[:3]) in (204, 304):
        length, chunked = 0, False
    keeps = "close" not in connection and (version == "HTTP/1.1" or "keep-alive" in connection)
    return Head(int(rest[:3]), length, chunked, keeps)


class Body:
    """Decodes the bytes after a head into those of the body."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._left = head.length
        """Bytes still to come, if their number is known."""
        self._rest = b""
        """Bytes of a chunk that has not arrived completely."""
        self._ending = False
        self.complete = head.length == 0

    def feed(self, data: bytes) -> bytes:
        """Decode the next bytes, and return the part of the body in them. Raises ValueError for an invalid chunk."""
        if self._head.ends_with_connection:
            return data
        if self._head.chunked:
            return b"".join(self._chunks(self._rest + data))
        assert self._left is not None
        self._left -= len(data)
        self.complete = self._left <= 0
        return data if self._left >= 0 else data[: self._left]

    def _chunks(self, raw: bytes) -> list[bytes]:
        """The contents of the chunks that are there as a whole. What follows them is kept."""
        parts: list[bytes] = []
        begin = 0
        # By positions: a server sends each token as a chunk, and cutting off what is read would copy all that follows.
        while not self.complete and (line_end := raw.find(b"\r\n", begin)) >= 0:
            if self._ending:
                self.complete = line_end == begin  # otherwise a trailer, which nobody wants
                begin = line_end + 2
                continue
            size = int(raw[begin:line_end].partition(b";")[0], 16)
            if size < 0:
                raise ValueError("a chunk of negative size")
            self._ending = size == 0
            end = line_end + 2 + size
            if not self._ending and len(raw) < end + 2:
                break
            parts.append(raw[line_end + 2 : end])
            begin = end if self._ending else end + 2
        self._rest = raw[begin:]
        if len(self._rest) > _MAX_CHUNK_HEAD_BYTES and b"\r\n" not in self._rest:
            raise ValueError("a chunk without a size")
        return parts


class Events:
    """Splits a stream of server-sent events, and returns the data of complete events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        data = self._rest + data
        # A regular expression looks at each byte by itself: five times slower.
        *events, self._rest = _END_OF_EVENT.split(data) if b"\r" in data else data.split(b"\n\n")
        return [found for event in events if (found := _data_of(event))]


def _data_of(event: bytes) -> bytes:
    """Return the data lines of an event, joined; comments and other fields are skipped."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = (line.removesuffix(b"\r") for line in event.split(b"\n"))
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
