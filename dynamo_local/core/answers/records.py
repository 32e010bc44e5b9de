"""The records of an answer's journal, as bytes.

A record is a length (4 bytes), a checksum (4 bytes), a kind (1 byte) and a content; numbers are little-endian, and
length and checksum (CRC-32) are those of kind and content. A journal that was cut is read up to its last whole record.
Readers show what stands before the last mark `SYNCED` alone: that is on the disk.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from dynamo_local.core.errors import DecodeError
from dynamo_local.core.messages.work import TokenDelta
from dynamo_local.core.usage.records import Counted

MAX_RECORD_BYTES = 64 * 1024 * 1024
"""A length beyond this is no length."""

MAX_PROMPT_TOKENS = 256 * 1024
"""Tokens of a prompt that are kept: about a megabyte."""

_HEAD = struct.Struct("<II")


@enum.unique
class Kind(enum.IntEnum):
    """What a record has."""

    BEGUN = 1
    """The first record: an `AnswerHead`."""
    PROMPT = 2
    """The prompt, once its tokens are known (`KeptPrompt`)."""
    TOKENS = 3
    """Tokens that the request's log has accepted (`TokenDelta`)."""
    EVENT = 4
    """An event of the stream, as JSON. The number of events before it is its sequence number."""
    SYNCED = 5
    """Empty: everything before it is on the disk."""
    COUNTED = 6
    """What was counted of the request's use so far (`Counted`); the last one holds."""
    BODY = 7
    """Of a task (core/async_tasks/records.py): the body of its request."""
    STARTED = 8
    """Of a task; empty: somebody has begun it."""
    RESULT = 9
    """Of a task: its result."""
    CALLED = 10
    """Of a task: its receiver was called."""


class Record(NamedTuple):
    """A record as it was read. `end`: where it ends, in bytes from the beginning of the journal."""

    kind: Kind
    content: bytes
    end: int


class AnswerHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an answer was begun with.

    `fields`: of the request's body. `earlier`: items of the conversation before its own input. `headers`: those that
    the request is passed on with. `created_at`: in seconds since 1970. `background`: it goes on without a client.
    """

    answer: str
    created_at: int
    fields: dict[str, Any]
    earlier: list[Any] = []
    headers: list[tuple[bytes, bytes]] = []
    background: bool = True


class KeptPrompt(msgspec.Struct, frozen=True, array_like=True):
    """The prompt that an answer was begun with. `digest`: of its tokens, and of what they are for. `token_ids`: None of
    a prompt that is longer than `MAX_PROMPT_TOKENS`."""

    digest: str
    token_ids: list[int] | None = None


def record(kind: Kind, content: bytes = b"") -> bytes:
    """Return a record as bytes."""
    body = bytes([kind]) + content
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def records_in(data: bytes, start: int = 0) -> list[Record]:
    """Return the whole records at the beginning of `data`, which stands at `start` in its journal."""
    found: list[Record] = []
    at = 0
    while len(data) - at >= _HEAD.size:
        length, checksum = _HEAD.unpack_from(data, at)
        body = data[at + _HEAD.size : at + _HEAD.size + length]
        if not 0 < length <= MAX_RECORD_BYTES or len(body) < length or zlib.crc32(body) != checksum:
            break
        try:
            kind = Kind(body[0])
        except ValueError:
            break
        at += _HEAD.size + length
        found.append(Record(kind, body[1:], start + at))
    return found


def shown(records: Sequence[Record]) -> Sequence[Record]:
    """Return those of the records that are known to be on the disk."""
    last = next((n for n in range(len(records) - 1, -1, -1) if records[n].kind is Kind.SYNCED), -1)
    return records[: last + 1]


_json = msgspec.json.Encoder()
_events = msgspec.json.Decoder(dict[str, Any])
_heads = msgspec.msgpack.Decoder(AnswerHead)
_deltas = msgspec.msgpack.Decoder(TokenDelta)
_prompts = msgspec.msgpack.Decoder(KeptPrompt)
_counts = msgspec.msgpack.Decoder(Counted)
_msgpack = msgspec.msgpack.Encoder()


def begun(head: AnswerHead) -> bytes:
    """Return the first record of a journal."""
    return record(Kind.BEGUN, _msgpack.encode(head))


def tokens(delta: TokenDelta) -> bytes:
    """Return the content of the record of accepted tokens."""
    return _msgpack.encode(delta)


def prompt(content: KeptPrompt) -> bytes:
    """Return the record of a prompt."""
    return record(Kind.PROMPT, _msgpack.encode(content))


def counted(content: Counted) -> bytes:
    """Return the record of what was counted."""
    return record(Kind.COUNTED, _msgpack.encode(content))


def event(content: dict[str, Any]) -> bytes:
    """Return the record of an event."""
    return record(Kind.EVENT, _json.encode(content))


def head_in(content: bytes) -> AnswerHead:
    """Inverse of `begun`. Raises DecodeError."""
    return _decoded(_heads, content)  # type: ignore[no-any-return]


def tokens_in(content: bytes) -> TokenDelta:
    """Inverse of `tokens`. Raises DecodeError."""
    return _decoded(_deltas, content)  # type: ignore[no-any-return]


def prompt_in(content: bytes) -> KeptPrompt:
    """Inverse of `prompt`. Raises DecodeError."""
    return _decoded(_prompts, content)  # type: ignore[no-any-return]


def counted_in(content: bytes) -> Counted:
    """Inverse of `counted`. Raises DecodeError."""
    return _decoded(_counts, content)  # type: ignore[no-any-return]


def event_in(content: bytes) -> dict[str, Any]:
    """Inverse of `event`. Raises DecodeError."""
    return _decoded(_events, content)  # type: ignore[no-any-return]


def _decoded(decoder: Any, content: bytes) -> Any:
    try:
        return decoder.decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DecodeError(f"the journal of an answer has a record that cannot be read: {error}") from error
