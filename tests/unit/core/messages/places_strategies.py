"""Generators of the messages between deciders and places."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from dynamo_local.core.messages.places import (
    MOST_LOG_LINES,
    DeviceRow,
    Done,
    EndOrder,
    ErrorQuestion,
    GraphOrder,
    HeadBeat,
    InventoryRow,
    LinesAnswer,
    LogQuestion,
    PlaceRow,
    PlacesAnswer,
    PlacesQuestion,
    PlacesReply,
    PlacesRequest,
    Refused,
    ReleaseOrder,
    ReservationRow,
    Reserved,
    ReserveOrder,
    StartOrder,
    StatusesAnswer,
    StatusesQuestion,
)

text = st.text(max_size=12)
texts = st.lists(text, max_size=3).map(tuple)
counts = st.integers(0, 2**31)
ids = st.lists(counts, max_size=3).map(tuple)
finite = st.floats(allow_nan=False, allow_infinity=False)
kinds = st.sampled_from(["gpu", "cpu-slot"])
words = st.dictionaries(text, text, max_size=3)
reservations = st.builds(ReservationRow, watcher=text, node=text, devices=ids, share=finite)
devices = st.builds(DeviceRow, id=counts, kind=kinds, name=text, cores=ids, uuid=text)
inventories = st.builds(
    InventoryRow,
    kind=kinds,
    devices=st.lists(devices, max_size=3).map(tuple),
    exclusive=st.booleans(),
    gone=st.dictionaries(counts, text, max_size=3),
)
places = st.builds(
    PlaceRow, node=text, inventory=inventories, reservations=st.lists(reservations, max_size=3).map(tuple)
)
statuses = st.dictionaries(text, st.sampled_from(["active", "stopped", "unknown"]), max_size=3)

PLACES_BY_KIND: dict[Any, st.SearchStrategy[Any]] = {
    PlacesRequest: st.builds(PlacesQuestion)
    | st.builds(
        ReserveOrder,
        watcher=text,
        role=text,
        devices=counts,
        share=finite,
        virtual=st.booleans(),
        on=st.none() | ids,
    )
    | st.builds(StartOrder, reservation=reservations, role=text, argv=texts, environment=words)
    | st.builds(EndOrder, watcher=text, deadline_s=finite)
    | st.builds(ReleaseOrder, watcher=text)
    | st.builds(StatusesQuestion)
    | st.builds(ErrorQuestion, watcher=text)
    | st.builds(LogQuestion, watcher=text, lines=st.integers(1, MOST_LOG_LINES), after=st.none() | counts)
    | st.builds(GraphOrder, revision=text, graph=st.binary(max_size=16)),
    PlacesReply: st.builds(PlacesAnswer, places=st.lists(places, max_size=2).map(tuple))
    | st.builds(Reserved, reservation=reservations)
    | st.builds(StatusesAnswer, statuses=statuses)
    | st.builds(LinesAnswer, lines=texts, end=counts)
    | st.builds(Done)
    | st.builds(Refused, error=text, cause=text, remedy=st.none() | text),
    HeadBeat: st.builds(HeadBeat, server=text),
}
"""Every message of these that travels by itself, as its receiver decodes it."""
