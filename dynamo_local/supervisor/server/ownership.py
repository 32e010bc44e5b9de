"""Keeps a server the only one of its namespace on a bus or a cluster, also where servers are on several machines."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dynamo_local.bus.jetstream.owner_record import RevisionError, decoded, encoded
from dynamo_local.bus.jetstream.streams import NoJetStreamError, StreamAbsentError
from dynamo_local.core.errors import BusError, NamespaceBusyError, SupervisorError
from dynamo_local.core.process.ownership import (
    RENEW_EVERY_S,
    Owner,
    Record,
    Refuse,
    Take,
    Watch,
    is_sure,
    judge,
    renewable,
)
from dynamo_local.supervisor.places.cluster import Cluster
from dynamo_local.supervisor.server.reports.report import Report, ReportOnce
from state.machine.identity import machine_id

_LOOK_EVERY_S = 0.25
_ATTEMPTS = 10
"""Number of times that the record may change between a look at it and its replacement."""


def owner_at(root: Path) -> Owner:
    """Make the owner for a server that starts: its files are below `root`, and it holds their lock."""
    machine = machine_id()
    home = f"{machine}:{root.resolve()}" if machine else ""
    return Owner(secrets.token_hex(8), home, socket.gethostname())


class OwnerRecord(Protocol):
    """The record of a namespace. All methods raise BusError or SupervisorError when it cannot be told."""

    async def make_room(self) -> None:
        """Make what records are kept in, if it is not there."""

    async def read(self) -> Record:
        """The record as it is."""

    async def replace(self, revision: int, owner: Owner | None) -> int:
        """Replace the record of that revision. Returns the new one. Raises RevisionError if there is another by now."""


_OWNER = "owner/"


@dataclass(frozen=True)
class ClusterRecord:
    """The record in the cluster of who owns the namespace there: a note named after
    its revision, of which the newest counts. A note is never changed, so of two that replace one revision one fails."""

    cluster: Cluster

    async def make_room(self) -> None:
        """A cluster always has room."""

    async def read(self) -> Record:
        """The record as it is."""
        notes = await self._notes()
        newest = max(notes, default=0)
        return decoded(newest, notes.get(newest, b""))

    async def replace(self, revision: int, owner: Owner | None) -> int:
        """Replace the record of that revision. Returns the new one. Raises RevisionError if there is another by now."""
        mine = revision + 1
        is_added = await self.cluster.add_note(f"{_OWNER}{mine}", encoded(owner))
        notes = await self._notes()
        # Of a revision that was replaced long ago the next note is gone as well, and was added again.
        if not is_added or max(notes, default=mine) > mine:
            if is_added:
                await self.cluster.remove_note(f"{_OWNER}{mine}")
            raise RevisionError(f"the owner in the cluster has not revision {revision} any more")
        for former in notes:
            if former < mine:
                await self.cluster.remove_note(f"{_OWNER}{former}")
        return mine

    async def _notes(self) -> dict[int, bytes]:
        notes = await self.cluster.notes()
        return {int(name.removeprefix(_OWNER)): data for name, data in notes.items() if name.startswith(_OWNER)}


@dataclass
class Ownership:
    """The claim of a server to its namespace. `where`: the place of the record, in words."""

    namespace: str
    mine: Owner
    report: Report
    where: str = "on this bus"
    renew_every_s: float = RENEW_EVERY_S
    _revision: int | None = field(default=None, init=False)
    """Of the own record; None as long as there is none."""
    _renewed_at: float = field(default=0.0, init=False)
    _is_released: bool = field(default=False, init=False)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def confirm(self, record: OwnerRecord) -> None:
        """Become the owner, or make sure to be the owner still. What only the owner may do is done right after.

        Raises NamespaceBusyError if another server is, BusError or SupervisorError if it cannot be told.
        """
        async with self._lock:
            await self._own(record)

    async def keep(self, record: OwnerRecord) -> None:
        """Renew the record until cancelled or released, or claim it, if that has not come about yet. Raises
        NamespaceBusyError if another server is the owner."""
        failure = ReportOnce(self.report)
        while True:
            await asyncio.sleep(self.renew_every_s)
            try:
                async with self._lock:
                    if self._is_released:
                        return
                    await self._own(record)
            except NoJetStreamError:
                # Nothing is there that another server could delete.
                failure.note("")
            except (BusError, SupervisorError) as error:
                sure = is_sure(self.mine, self._renewed_at, time.monotonic())
                failure.note("" if sure else f"that this server owns namespace {self.namespace} is not sure: {error}")
            else:
                failure.note("")

    async def release(self, record: OwnerRecord) -> None:
        """Let another server have the namespace at once. Raises BusError, SupervisorError."""
        async with self._lock:
            self._is_released = True
            revision, self._revision = self._revision, None
            if revision is not None:
                with suppress(RevisionError, StreamAbsentError):
                    await record.replace(revision, None)

    async def _own(self, record: OwnerRecord) -> None:
        if self._revision is None:
            await record.make_room()
            await self._claim(record)
        else:
            await self._renew(record, self._revision)

    async def _claim(self, record: OwnerRecord) -> None:
        watch: Watch | None = None
        attempts = 0
        while attempts < _ATTEMPTS:
            found = await record.read()
            verdict = judge(found, self.mine, watch, time.monotonic())
            match verdict:
                case Refuse(owner):
                    raise self._busy(owner)
                case Take(revision):
                    with suppress(RevisionError):
                        await self._write(record, revision)
                        return
                    attempts += 1
                case Watch():
                    if watch is None:
                        self._say_why(found)
                    watch = verdict
            await asyncio.sleep(_LOOK_EVERY_S)
        raise BusError(f"the owner of namespace {self.namespace} changes all the time")

    async def _renew(self, record: OwnerRecord, revision: int) -> None:
        try:
            await self._write(record, revision)
        except (RevisionError, StreamAbsentError):
            await self._recover(record)

    async def _recover(self, record: OwnerRecord) -> None:
        await record.make_room()
        found = await record.read()
        if not renewable(found, self.mine):
            assert found.owner is not None
            raise self._busy(found.owner)
        await self._write(record, found.revision)

    async def _write(self, record: OwnerRecord, revision: int) -> None:
        sent_at = time.monotonic()
        self._revision = await record.replace(revision, self.mine)
        self._renewed_at = sent_at

    def _say_why(self, found: Record) -> None:
        assert found.owner is not None
        self.report.step(
            f"namespace {self.namespace} was last served by a server on {found.owner.host}: looking for up to "
            f"{found.owner.lease_s:g} s whether it still runs"
        )

    def _busy(self, owner: Owner) -> NamespaceBusyError:
        return NamespaceBusyError(
            f"namespace {self.namespace} {self.where} belongs to a server on {owner.host}",
            "stop that one there, or start this one with another --namespace",
        )
