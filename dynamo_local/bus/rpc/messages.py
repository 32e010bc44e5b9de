"""Messages of endpoint calls, between caller and server.

    caller -> Subjects.call(service, endpoint)     Begin                     one instance gets it
    server -> the caller's inbox.{call id}         Taken | Refused           then, after Taken:
                                                   Reply* (Done | Failed)    with Alive in between
    caller -> Subjects.call_control(call id)       Credit | Hangup

Frames of a call are numbered: `seq` counts from 0, over Reply, Done and Failed. Alive carries the number of the next
frame, so that a loss shows even when no frame follows. Both sides send something every beat; a side that hears nothing
for `SILENT_BEATS` of its own beats takes the other for dead. A server sends at most `WINDOW` replies beyond the last
credit, which bounds what a slow reader makes its process keep.
"""

from __future__ import annotations

import msgspec

from dynamo_local.core.codec import VERSION

BEAT_S = 1.0
SILENT_BEATS = 5
"""Beats, not seconds: a process that was held up has counted few beats, and does not blame the other side."""

WINDOW = 128
"""Replies of a call that are on their way or not read yet, at most."""

MAX_CALLS = 1024
"""Calls that one process serves at once, at most."""


class Begin(msgspec.Struct, frozen=True):
    """Starts a call. `request` is msgpack, empty if there is none."""

    call_id: str
    request: bytes
    v: int = VERSION


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """An instance serves the call and listens to its control subject."""

    v: int = VERSION


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The call was not begun; it may be tried again."""

    reason: str
    v: int = VERSION


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """A reply, in msgpack."""

    seq: int
    data: bytes
    v: int = VERSION


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The call has ended: no more replies follow."""

    seq: int
    v: int = VERSION


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The endpoint raised. `error` is one line."""

    seq: int
    error: str
    v: int = VERSION


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """The call goes on; frame `seq` is the next."""

    seq: int
    v: int = VERSION


class Credit(msgspec.Struct, frozen=True, tag="credit"):
    """The caller is alive, and has read `read` replies."""

    read: int
    v: int = VERSION


class Hangup(msgspec.Struct, frozen=True, tag="hangup"):
    """The caller wants no more replies."""

    v: int = VERSION


Frame = Taken | Refused | Reply | Done | Failed | Alive
Control = Credit | Hangup
