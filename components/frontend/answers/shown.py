"""What clients see of an answer: read from its journal, whichever frontend writes that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from dynamo_local.core.answers.records import AnswerHead, Kind, Record, event_in, head_in
from dynamo_local.core.answers.status import AnswerState, OutOfOrderError, stream_event
from dynamo_local.core.errors import DecodeError
from dynamo_local.core.http.dialects import comment
from dynamo_local.core.http.waiting.holding import COMMENT_EVERY_S
from state.answers.folder import AnswerFolder
from state.answers.journal import AnswerReader

LOOK_EVERY_S = 0.03
"""Between two looks at a journal that others write."""

_UNWRITTEN = "the rest of the answer could not be written: the disk was full, or has failed"


class Shown:
    """An answer, as far as its journal tells. `head`: None until it was read."""

    def __init__(self, folder: AnswerFolder, owner: str, answer: str, reader: AnswerReader) -> None:
        self._folder = folder
        self._owner = owner
        self._answer = answer
        self._reader = reader
        self.head: AnswerHead | None = None
        self.state = AnswerState()

    def read(self) -> list[bytes]:
        """Read what is new. Returns the events among it, as they are sent. Blocks; raises DecodeError."""
        is_running = self._folder.is_running(self._owner, self._answer)
        records = self._reader.read()
        events = self._take(records)
        if not records and not is_running and not self.state.has_ended and not self._reader.is_removed:
            # Nothing follows, and there is no last event.
            events.append(self._fail())
        return events

    @property
    def has_more(self) -> bool:
        """Whether a read may find anything."""
        return self._reader.has_more or not self._folder.is_running(self._owner, self._answer)

    @property
    def is_removed(self) -> bool:
        """Whether the answer was deleted."""
        return self._reader.is_removed

    def close(self) -> None:
        """End the reading."""
        self._reader.close()

    def _take(self, records: Sequence[Record]) -> list[bytes]:
        events: list[bytes] = []
        for one in records:
            if one.kind is Kind.BEGUN:
                self.head = head_in(one.content)
            elif one.kind is Kind.EVENT:
                event = event_in(one.content)
                try:
                    self.state.take(event)
                except OutOfOrderError as error:
                    raise DecodeError(f"the journal of {self._answer} is out of order: {error}") from error
                events.append(stream_event(event, one.content))
        return events

    def _fail(self) -> bytes:
        event = self.state.failed(_UNWRITTEN)
        self.state.take(event)
        return stream_event(event, msgspec.json.encode(event))


def open_shown(folder: AnswerFolder, owner: str, answer: str) -> Shown | None:
    """Read an answer as far as it is now. None: this owner has none such. Blocks; raises StateError, DecodeError."""
    reader = folder.reader(owner, answer)
    if reader is None:
        return None
    shown = Shown(folder, owner, answer, reader)
    try:
        while not shown.state.has_ended and shown.has_more and shown.read():
            pass
    except BaseException:
        shown.close()
        raise
    return shown


async def followed(shown: Shown, after: int, is_over: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
    """Give the events behind that number, and those that come, as parts of a stream. It ends with the answer, or when
    it is over: then the client may go on from where it is. `shown` has read nothing yet. Raises DecodeError."""
    told_at = time.monotonic()
    number = 0
    while not is_over() and not shown.is_removed:
        events = await asyncio.to_thread(shown.read) if shown.has_more else []
        part = b"".join(event for n, event in enumerate(events, number) if n > after)
        number += len(events)
        now = time.monotonic()
        if part or now - told_at > COMMENT_EVERY_S:
            told_at = now
            yield part or comment(f"the answer is {shown.state.status}")
        if shown.state.has_ended:
            return
        if not events:
            await asyncio.sleep(LOOK_EVERY_S)
