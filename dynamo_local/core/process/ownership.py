"""Which server owns a namespace on a bus, where several machines may each have one. Pure.

The owner's record is on the bus. Each change of it says which revision it replaces, so of two at once one fails. The
owner renews it. Another server watches it first, by its own clock, and replaces it only when it was silent for its
lease. The owner counts that time from before it sent its renewal, so it knows before the other that its time is over:
no clock is shared.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

RECORD_VERSION = 2
"""Version of the record. Servers of several releases may read it."""
LEASE_S = 10.0
"""An owner that has renewed nothing for so long may be replaced."""
RENEW_EVERY_S = 2.5
_SURE = 0.9
"""The part of its lease for which an owner takes the namespace for its own: the clocks of two machines do not run
equally fast."""


class Owner(msgspec.Struct, frozen=True):
    """A server that owns a namespace. `server`: name of this run. `home`: the place of its files, where one server runs
    at a time; empty if that is not known. `host`: name of its machine, for people."""

    server: str
    home: str
    host: str
    lease_s: float = LEASE_S
    v: int = RECORD_VERSION


@dataclass(frozen=True)
class Record:
    """What is on the bus. `revision`: number of its last change, 0 if there was none. `owner`: None if nobody owns."""

    revision: int = 0
    owner: Owner | None = None


@dataclass(frozen=True)
class Take:
    """Replace the record of this revision by one's own."""

    revision: int


@dataclass(frozen=True)
class Watch:
    """Look again, and ask with this once more. `record`: as it was seen first, at `since`, a moment (s) of the clock of
    who asks."""

    record: Record
    since: float


@dataclass(frozen=True)
class Refuse:
    """The owner is alive."""

    owner: Owner


def judge(record: Record, mine: Owner, watch: Watch | None, now: float) -> Take | Watch | Refuse:
    """What a server that wants to own the namespace does next. `now`: a moment after the record was read."""
    owner = record.owner
    if owner is None or owner.server == mine.server or (owner.home and owner.home == mine.home):
        # A former server of the same place has ended: only one runs there.
        return Take(record.revision)
    if watch is None:
        return Watch(record, now)
    if watch.record.revision != record.revision:
        return Refuse(owner)
    return Take(record.revision) if now - watch.since >= owner.lease_s else watch


def renewable(record: Record, mine: Owner) -> bool:
    """Whether an owner whose renewal has failed may renew this record instead: the answer to a renewal was lost, or the
    bus has lost the record. Otherwise the namespace has another owner."""
    return record.owner is None or record.owner.server == mine.server


def is_sure(mine: Owner, renewed_at: float, now: float) -> bool:
    """Whether nobody else can own the namespace yet. `renewed_at`: moment (s) before the last renewal that came about
    was sent."""
    return now - renewed_at < mine.lease_s * _SURE
