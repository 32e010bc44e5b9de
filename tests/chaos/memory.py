"""Samples memory and open files of the processes that live through a whole run."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.chaos.processes import open_files, resident_kb

EVERY_S = 1.0
SETTLED = 0.3
"""Share of the run after which caches and pools have filled, 0 to 1. Growth counts from there."""

ALLOWED_KB = 48 * 1024
ALLOWED_FILES = 40


@dataclass
class _Series:
    pid: int
    kb: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Growth:
    """Memory and open files of a process, when settled and at the end."""

    settled_mb: float
    end_mb: float
    settled_files: int
    end_files: int

    @property
    def bounded(self) -> bool:
        return (self.end_mb - self.settled_mb) * 1024 <= ALLOWED_KB and (
            self.end_files - self.settled_files <= ALLOWED_FILES
        )


class MemoryWatch:
    """Samples processes by name. A new process under a name starts a new series."""

    def __init__(self) -> None:
        self._series: dict[str, _Series] = {}

    def sample(self, pids: dict[str, int]) -> None:
        for name, pid in pids.items():
            kb, files = resident_kb(pid), open_files(pid)
            if kb is None or files is None:
                continue
            series = self._series.get(name)
            if series is None or series.pid != pid:
                series = self._series[name] = _Series(pid)
            series.kb.append(kb)
            series.files.append(files)

    def growth(self) -> dict[str, Growth]:
        """Return the growth of each process, from the smallest of three samples at either end: garbage varies."""
        found = {}
        for name, series in self._series.items():
            at = int(len(series.kb) * SETTLED)
            found[name] = Growth(
                settled_mb=round(min(series.kb[at : at + 3]) / 1024, 1),
                end_mb=round(min(series.kb[-3:]) / 1024, 1),
                settled_files=min(series.files[at : at + 3]),
                end_files=min(series.files[-3:]),
            )
        return found
