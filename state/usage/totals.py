"""Folds journals into the totals, and reads both."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from dynamo_local.core.errors import StateError
from dynamo_local.core.usage import KEEP_DAYS
from dynamo_local.core.usage.records import records_in, whole_lines
from dynamo_local.core.usage.totals import NewerTotalsError, UsageTotals, decode_totals, encode_totals
from state.files import DISK, Disk, replace_file, system_errors
from state.locks import lock_abandoned
from state.paths import StatePaths

_READS = 5
"""Attempts to read totals and journals while no fold comes between."""


@dataclass(frozen=True)
class Folded:
    """The outcome of a fold: `damaged` lines, and `notes` about what else is to be told."""

    damaged: int = 0
    notes: tuple[str, ...] = ()


class UsageStore:
    """The totals of one namespace, for its server: there may be one that folds. Blocks while it reads and writes."""

    def __init__(self, paths: StatePaths, *, keep_days: int = KEEP_DAYS, disk: Disk = DISK) -> None:
        self._paths = paths
        self._keep_days = keep_days
        self._disk = disk

    def fold(self, now: float) -> Folded:
        """Add what journals have more than the totals, and remove the journals that have ended. `now`: in seconds since
        1970. Raises StateError; then nothing was folded."""
        if not has_usage(self._paths):
            return Folded()
        with ExitStack() as stack:
            if not self._lock(stack):
                # A server that has taken this one's place.
                return Folded()
            return self._fold(now, stack)

    def _lock(self, stack: ExitStack) -> bool:
        with system_errors(f"cannot lock {self._paths.usage_dir}"):
            descriptor = os.open(self._paths.usage_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    def _fold(self, now: float, stack: ExitStack) -> Folded:
        journals = _journals(self._paths)
        totals, sequence, notes = self._read()
        known = {path.name for path in journals}
        changed = totals.forget([name for name in totals.folded if name not in known])
        damaged = totals.damaged
        ended = []
        for path in journals:
            with system_errors(f"cannot read {path}"):
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, descriptor)
                # Before it is read: nothing is added afterwards.
                if lock_abandoned(descriptor, path):
                    ended.append(path)
            changed |= _fold(totals, path)
        totals.age(now, self._keep_days)
        if changed:
            replace_file(self._paths.usage_totals, encode_totals(totals, sequence + 1), self._disk)
        for path in ended:
            with system_errors(f"cannot remove {path}"):
                path.unlink(missing_ok=True)
        return Folded(totals.damaged - damaged, notes)

    def _read(self) -> tuple[UsageTotals, int, tuple[str, ...]]:
        path = self._paths.usage_totals
        try:
            return *_read_totals(self._paths), ()
        except NewerTotalsError:
            raise
        except StateError as error:
            kept = path.with_name(f"{path.name}.damaged")
            with system_errors(f"cannot rename {path}"):
                path.replace(kept)
            return UsageTotals(), 0, (f"{error.cause}; it is kept as {kept}, and usage is counted anew",)


def read_usage(paths: StatePaths) -> UsageTotals:
    """Return what all requests have used until now, whether or not a server runs. Raises StateError."""
    for _ in range(_READS):
        totals, sequence = _read_totals(paths)
        for path in _journals(paths):
            _fold(totals, path)
        if _read_totals(paths)[1] == sequence:
            return totals
    raise StateError("the journals of usage were folded while they were read", "try again")


def has_usage(paths: StatePaths) -> bool:
    """Whether the namespace has totals or journals."""
    return paths.usage_totals.exists() or bool(_journals(paths))


def _read_totals(paths: StatePaths) -> tuple[UsageTotals, int]:
    with system_errors(f"cannot read {paths.usage_totals}"):
        try:
            data = paths.usage_totals.read_bytes()
        except FileNotFoundError:
            return UsageTotals(), 0
    return decode_totals(data)


def _journals(paths: StatePaths) -> list[Path]:
    with system_errors(f"cannot list {paths.usage_dir}"):
        return sorted(_named_like_journals(paths)) if paths.usage_dir.exists() else []


def _named_like_journals(paths: StatePaths) -> Iterator[Path]:
    return paths.usage_dir.glob(paths.usage_journal("*", "*").name)


def _fold(totals: UsageTotals, path: Path) -> bool:
    """Add what a journal has more. Return whether it has."""
    with system_errors(f"cannot read {path}"):
        try:
            with path.open("rb") as file:
                file.seek(totals.folded.get(path.name, 0))
                lines = whole_lines(file.read())
        except FileNotFoundError:
            # Folded and removed just now; the totals tell.
            return False
    if lines:
        totals.fold(path.name, records_in(lines), len(lines))
    return bool(lines)
