"""Answers that are kept, by HTTP: begun, shown, followed, cancelled, deleted. Each is there for its owner alone."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from components.frontend.answers.answers import AGAIN, Answers, AnswerSink, RunningAnswer
from components.frontend.http.exchange import unavailable, watched
from components.frontend.http.incoming import Asked, read_body, replayed
from components.frontend.http.outgoing import answer_json, page, query_of, refusal_of, stream_headers
from components.frontend.request_context import caller_of
from dynamo_local.core.answers.events import AnswerState, OutOfOrderError, stream_event
from dynamo_local.core.answers.records import AnswerHead, Kind, Record, event_in, head_in
from dynamo_local.core.answers.requests import (
    PREVIOUS,
    asking_fields,
    continued,
    continued_body,
    contradiction,
    input_items,
    is_answer_id,
    is_kept,
    not_found,
)
from dynamo_local.core.errors import ConfigError, DecodeError, StateError, StorageFullError
from dynamo_local.core.http.asgi import Event, Receive, Scope, Send, header
from dynamo_local.core.http.bounds.admission import (
    HEADER_KEY,
    AdmissionLimits,
    Refusal,
    examine_headers,
    priority_asked,
)
from dynamo_local.core.http.dialects import comment
from dynamo_local.core.http.json_text import boolean
from dynamo_local.core.http.paths import INPUT_ITEMS, RESPONSES
from dynamo_local.core.http.waiting import COMMENT_EVERY_S
from dynamo_local.tasks import finish_in_thread
from state.answers.folder import AnswerFolder
from state.answers.journal import AnswerReader

_ITEMS_LISTED, _MOST_ITEMS = 20, 100
"""Items of an input that are listed unless more are asked for, and at most."""

_CANCEL_S = 10.0
"""Longest wait for the end of an answer that was cancelled, which another frontend may compute."""


class AnswersRest:
    """Serves the paths of answers that are kept."""

    def __init__(self, answers: Answers, is_draining: Callable[[], bool]) -> None:
        self._answers = answers
        self._folder = answers.folder
        self._is_draining = is_draining

    async def serve(
        self,
        asked: Asked,
        limits: AdmissionLimits,
        receive: Receive,
        send: Send,
        others: Serve,
        *,
        keeps: bool = True,
    ) -> Refusal | None:
        """Answer a request that may be about answers that are kept, or return a refusal. `others`: serves those whose
        answers are not kept; `keeps` False: all. Raises BodyRefusedError, ClientGoneError."""
        body = await read_body(asked.headers, receive, limits)
        fields = asking_fields(body)
        if fields is not None and keeps and is_kept(fields):
            refusal = examine_headers(asked.scope["headers"])
            return refusal or await self.create(asked.scope, fields, receive, send)
        if fields is not None and fields.get(PREVIOUS) is not None:
            earlier = await self.earlier(asked.caller.owner, fields)
            if isinstance(earlier, Refusal):
                return earlier
            body, send = continued_body(fields, earlier), _telling(fields[PREVIOUS], send)
        return await others(asked, replayed(body, receive), send)

    async def create(self, scope: Scope, fields: dict[str, Any], receive: Receive, send: Send) -> Refusal | None:
        """Begin an answer. A client that asks for the background gets what is there, others wait for the end."""
        try:
            return await self._create(scope, fields, receive, send)
        except (StateError, DecodeError) as error:
            return refusal_of(error)

    async def earlier(self, owner: str, fields: dict[str, Any]) -> list[Any] | Refusal:
        """Return the conversation from which a request of the owner goes on; empty: from none."""
        previous = fields.get(PREVIOUS)
        if previous is None:
            return []
        if not isinstance(previous, str):
            return Refusal(400, f"{PREVIOUS} is no string", "invalid_request_error", PREVIOUS)
        try:
            shown = await self._open(owner, previous)
        except (StateError, DecodeError) as error:
            return refusal_of(error)
        if shown is None or shown.head is None:
            return not_found(previous)
        return continued(shown.head, shown.state.response)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> Refusal | None:
        """Answer a request about an answer that is kept."""
        owner, path = caller_of(scope).owner, scope["path"].removeprefix(f"{RESPONSES}/")
        name, _, action = path.partition("/")
        if not is_answer_id(name):
            return not_found(name)
        try:
            if action == INPUT_ITEMS[1:]:
                return await self._list_input(owner, name, scope, send)
            if action:
                return await self._cancel(owner, name, send)
            if scope["method"] == "DELETE":
                return await self._delete(owner, name, send)
            return await self._show(owner, name, scope.get("query_string", b""), receive, send)
        except (StateError, DecodeError, ConfigError) as error:
            return refusal_of(error)

    async def _list_input(self, owner: str, name: str, scope: Scope, send: Send) -> Refusal | None:
        """Show a page of what an answer was computed from; by default the newest items first, as at OpenAI."""
        asked = query_of(scope, frozenset({"limit", "after", "order", "include", "include[]"}))
        order = asked.get("order", "desc")
        if order not in ("asc", "desc"):
            raise ConfigError(f"order must be asc or desc, got {order[:20]!r}")
        shown = await self._open(owner, name)
        if shown is None or shown.head is None:
            return not_found(name)
        items = input_items(shown.head)[:: 1 if order == "asc" else -1]
        asked.setdefault("limit", str(_ITEMS_LISTED))
        await answer_json(send, page(items, asked, lambda item: str(item["id"]), lambda item: item, _MOST_ITEMS))
        return None

    async def _create(self, scope: Scope, fields: dict[str, Any], receive: Receive, send: Send) -> Refusal | None:
        owner = caller_of(scope).owner
        refusal = contradiction(fields) or await self._closed(owner)
        if refusal is not None:
            return refusal
        priority = priority_asked(fields, header(scope, HEADER_KEY), caller_of(scope).priorities)
        if isinstance(priority, Refusal):
            return priority
        earlier = await self.earlier(owner, fields)
        if isinstance(earlier, Refusal):
            return earlier
        head = AnswerHead(
            answer=f"resp_{secrets.token_hex(16)}",
            created_at=int(self._answers.wall_clock()),
            fields=fields,
            earlier=earlier,
            headers=[(HEADER_KEY, str(priority).encode())],
            background=boolean(fields.get("background")) is True,
        )
        running = await self._answers.begin(owner, head)
        with watched(receive) as gone:
            first: set[asyncio.Future[Any]] = {running.begun, gone}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            refused = running.begun.result() if running.begun.done() else None
            if refused is not None and not (head.background and refused.status in AGAIN):
                await self._drop(owner, running)
                await _pass_refusal(refused, send)
                return None
            return await self._tell(owner, running, gone, send)

    async def _tell(self, owner: str, running: RunningAnswer, gone: asyncio.Future[None], send: Send) -> Refusal | None:
        """Answer the client that has begun an answer."""
        head = running.head
        streams = boolean(head.fields.get("stream"))
        if streams:
            await self._follow(owner, head.answer, -1, gone, send)
        elif not head.background:
            ended = asyncio.ensure_future(self._answers.ended(head.answer))
            await asyncio.wait({ended, gone}, return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
        if gone.done() and not head.background:
            # Nobody waits for it.
            await self._drop(owner, running)
            return None
        return None if streams else await self._show_now(owner, head.answer, send)

    async def _closed(self, owner: str) -> Refusal | None:
        """Refuse all answers. Raises StorageFullError for those of this owner."""
        if self._is_draining():
            return unavailable("the server is shutting down")
        if self._answers.why_closed:
            return unavailable(self._answers.why_closed)
        kept, limits = await asyncio.to_thread(self._folder.kept, owner), self._answers.limits
        if kept.answers >= limits.max_answers:
            why = f"{kept.answers} answers are kept for this key already (setting max-answers)"
        elif kept.size >= limits.max_answer_bytes:
            why = f"answers of {kept.size} bytes are kept for this key already (setting max-answer-bytes)"
        else:
            return None
        raise StorageFullError(why, "delete some, or wait until they expire")

    async def _show(self, owner: str, name: str, query: bytes, receive: Receive, send: Send) -> Refusal | None:
        asked = dict(parse_qsl(query.decode("latin-1")))
        after = asked.get("starting_after", "-1")
        if not after.removeprefix("-").isdigit() or len(after) > 18:
            return Refusal(400, "starting_after is no sequence number", "invalid_request_error", "starting_after")
        if not boolean(asked.get("stream")):
            return await self._show_now(owner, name, send)
        if not await asyncio.to_thread(self._is_there, owner, name):
            return not_found(name)
        with watched(receive) as gone:
            await self._follow(owner, name, int(after), gone, send)
        return None

    async def _show_now(self, owner: str, name: str, send: Send) -> Refusal | None:
        shown = await self._open(owner, name)
        if shown is None:
            return not_found(name)
        await answer_json(send, shown.state.response)
        return None

    async def _open(self, owner: str, name: str) -> Shown | None:
        """Read an answer as far as it is now. None: it is not there, or not this owner's."""
        if not is_answer_id(name):
            return None
        shown = await finish_in_thread(lambda: open_shown(self._folder, owner, name))
        if shown is not None:
            shown.close()
        return shown

    def _is_there(self, owner: str, name: str) -> bool:
        reader = self._folder.reader(owner, name)
        if reader is not None:
            reader.close()
        return reader is not None

    async def _follow(self, owner: str, name: str, after: int, gone: asyncio.Future[None], send: Send) -> None:
        """Send the events behind that number, until the answer or the client ends."""
        reader = await finish_in_thread(lambda: self._folder.reader(owner, name))
        if reader is None:
            return
        shown = Shown(self._folder, owner, name, reader)
        headers = stream_headers([(b"content-type", b"text/event-stream; charset=utf-8")])
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async with aclosing(followed(shown, after, lambda: gone.done() or self._is_draining())) as parts:
                async for part in parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        finally:
            shown.close()
        if not gone.done():
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _cancel(self, owner: str, name: str, send: Send) -> Refusal | None:
        if not await self._end(owner, name):
            return unavailable(f"response {name} has not ended yet: it is being cancelled")
        return await self._show_now(owner, name, send)

    async def _delete(self, owner: str, name: str, send: Send) -> Refusal | None:
        if not await self._end(owner, name):
            return unavailable(f"response {name} has not ended yet: it is being cancelled")
        if not await finish_in_thread(lambda: self._folder.remove(owner, name)):
            return not_found(name)
        await answer_json(send, {"id": name, "object": "response", "deleted": True})
        return None

    async def _end(self, owner: str, name: str) -> bool:
        """Have an answer end, whoever computes it. Returns whether it does not run any more."""
        if not await asyncio.to_thread(self._folder.is_running, owner, name):
            return True
        await finish_in_thread(lambda: self._folder.ask_to_cancel(owner, name))
        running = self._answers.running(name)
        if running is not None:
            running.cancel()
        deadline = time.monotonic() + _CANCEL_S
        while time.monotonic() < deadline:
            if not await asyncio.to_thread(self._folder.is_running, owner, name):
                return True
            await asyncio.sleep(LOOK_EVERY_S)
        return False

    async def _drop(self, owner: str, running: RunningAnswer) -> None:
        """End an answer that nobody wants, and keep nothing of it."""
        name = running.head.answer
        running.cancel()
        await self._answers.ended(name)
        await finish_in_thread(lambda: self._folder.remove(owner, name))


async def _pass_refusal(refused: AnswerSink, send: Send) -> None:
    """Answer with what the application has refused the request with."""
    await send({"type": "http.response.start", "status": refused.status, "headers": refused.headers})
    await send({"type": "http.response.body", "body": refused.body})


# What clients see of an answer: read from its journal, whichever frontend writes that.

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


# Requests about answers that are kept are told from others by what their bodies ask for.

Serve = Callable[[Asked, Receive, Send], Awaitable[Refusal | None]]
"""Answers a request, or returns a refusal."""

_NO_PREVIOUS = f'"{PREVIOUS}":null'.encode()
"""As vLLM's application writes it, nowhere but in a field of that name: quotes in texts are escaped."""


def _telling(previous: str, send: Send) -> Send:
    """Return an ASGI `send` for an answer that goes on from another one: it tells from which, since vLLM's application
    was not told."""
    named = _NO_PREVIOUS.removesuffix(b"null") + msgspec.json.encode(previous)

    async def send_on(event: Event) -> None:
        if event["type"] == "http.response.start":
            headers = [header for header in event["headers"] if header[0].lower() != b"content-length"]
            await send({**event, "headers": headers})
        else:
            await send({**event, "body": event.get("body", b"").replace(_NO_PREVIOUS, named)})

    return send_on
