"""Answers who asks for what a server tells of itself: its events, as a list or as a stream of server-sent events that
never ends, and its logs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo_local.control.operations import GET_LOG, LIST_EVENTS, Call, Handlers
from dynamo_local.core.errors import OrderError
from dynamo_local.core.http.json_text import as_line
from dynamo_local.core.messages.reports import PASSING_KINDS, TOLD_KINDS
from dynamo_local.core.names import parse_watcher
from dynamo_local.supervisor.control.api import EventStream
from dynamo_local.supervisor.places.far import MOST_LOG_LINES
from dynamo_local.supervisor.places.port import Places
from dynamo_local.supervisor.server.reports.event_log import NOW, Recent, RecentEvents

HEARTBEAT_S = 5.0
TAKEN_WITHIN_S = 10.0
"""A reader that takes nothing for so long is cut. It can come back, and goes on where it was."""
_BEAT = b":\n\n"


@dataclass(frozen=True)
class EventAnswers:
    """Answers with the events of a server."""

    recent: RecentEvents
    heartbeat_s: float = HEARTBEAT_S
    taken_within_s: float = TAKEN_WITHIN_S

    @property
    def handlers(self) -> Handlers:
        return {LIST_EVENTS: self.answer}

    async def answer(self, call: Call) -> Any:
        kinds, after = _kinds_in(call), self.recent.number_of(call.query.get("after", ""))
        if call.streams:
            return EventStream(self._told(after, kinds), self.taken_within_s)
        found = [self._shown(one) for one in self._after(after, kinds) if _is_of(one, kinds)]
        return {"object": "list", "data": found, "last": self.recent.id_of(self.recent.number_of(NOW))}

    async def _told(self, after: int, kinds: Collection[str]) -> AsyncIterator[bytes]:
        while True:
            found, ended = self._after(after, kinds), self.recent.ended
            for one in found:
                # Comments as well in place of what is left out: a reader hears that the stream is alive.
                yield self._message(one) if _is_of(one, kinds) else _BEAT
                after = one.number
            if ended:
                return
            if not found and not await self.recent.changed(self.heartbeat_s):
                yield _BEAT

    def _after(self, number: int, kinds: Collection[str]) -> list[Recent]:
        return self.recent.after(number, not PASSING_KINDS.keys().isdisjoint(kinds))

    def _message(self, one: Recent) -> bytes:
        data = as_line(msgspec.json.encode(self._shown(one)))
        return f"id: {self.recent.id_of(one.number)}\n".encode() + b"data: " + data + b"\n"

    def _shown(self, one: Recent) -> dict[str, Any]:
        return {"id": self.recent.id_of(one.number), **msgspec.to_builtins(one.event)}


@dataclass(frozen=True)
class LogAnswers:
    """Answers with logs of processes."""

    places: Places

    @property
    def handlers(self) -> Handlers:
        return {GET_LOG: self.answer}

    async def answer(self, call: Call) -> Any:
        watcher, lines = str(parse_watcher(call.names["watcher"])), min(call.number("lines", 100), MOST_LOG_LINES)
        after = call.number("after", 0) if "after" in call.query else None
        part = await self.places.log(watcher, lines, after)
        return {"object": "log", "watcher": watcher, "lines": part.lines, "end": part.end}


def _kinds_in(call: Call) -> Collection[str]:
    text = call.query.get("kind", "")
    kinds = text.split(",") if text else ()
    for kind in kinds:
        if kind not in TOLD_KINDS:
            there = ", ".join(TOLD_KINDS)
            raise OrderError(f"there are no events of kind {kind[:60]!r}", f"there are: {there}", param="kind")
    return kinds


def _is_of(one: Recent, kinds: Collection[str]) -> bool:
    return not kinds or one.event.kind in kinds
