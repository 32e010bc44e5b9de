"""Follows the events of a server on this machine: a stream of server-sent events over its unix socket. Blocks."""

from __future__ import annotations

import http.client
import time
from collections.abc import Collection, Iterator
from urllib.parse import urlencode

import msgspec

from dynamo_local.control.client import EVENT_STREAM, LAST_EVENT_ID, ControlClient, UnixConnection
from dynamo_local.control.errors import error_of
from dynamo_local.control.operations import LIST_EVENTS, LIST_WORKERS
from dynamo_local.core.messages.reports import Event
from state.files import sockets_of
from state.namespaces import is_running
from state.paths import StatePaths

_SILENT_S = 15.0
"""A stream of events is silent for so long only if it is lost: three heartbeats."""
_AGAIN_S = 0.2


def events_of(
    paths: StatePaths, *, timeout_s: float, after: str = "", kinds: Collection[str] = ()
) -> Iterator[tuple[str, Event]]:
    """Yield events with their ids, those of the last hour first, or those after that id, then each as it happens;
    return once the time is over. A connection that is lost costs no event. Raises NotRunningError when no server runs
    any more, and what the server answers instead of a stream."""
    give_up_at = time.monotonic() + timeout_s
    event_id, path = after, LIST_EVENTS.path + (f"?{urlencode({'kind': ','.join(kinds)})}" if kinds else "")
    while (left_s := give_up_at - time.monotonic()) > 0:
        connection = UnixConnection(str(sockets_of(paths).control), min(left_s, _SILENT_S))
        try:
            connection.request(LIST_EVENTS.method, path, headers={"accept": EVENT_STREAM, LAST_EVENT_ID: after})
            for line in _lines(connection, give_up_at):
                if line.startswith(b"id: "):
                    event_id = line[4:].decode()
                elif line.startswith(b"data: "):
                    after = event_id
                    yield after, msgspec.json.decode(line[6:], type=Event)
        except (OSError, http.client.HTTPException):
            if not is_running(paths):
                ControlClient(paths).do(LIST_WORKERS)
            time.sleep(_AGAIN_S)
        finally:
            connection.close()


def _lines(connection: UnixConnection, give_up_at: float) -> Iterator[bytes]:
    """The lines of a stream, until the time is over. Raises OSError or HTTPException when it is lost."""
    answer = connection.getresponse()
    if answer.status >= http.client.BAD_REQUEST:
        raise error_of(answer.status, answer.read())
    while (left_s := give_up_at - time.monotonic()) > 0:
        connection.sock.settimeout(min(left_s, _SILENT_S))
        line = answer.readline()
        if not line.endswith(b"\n"):
            raise http.client.IncompleteRead(b"")
        yield line.rstrip(b"\n")
