"""Lines of logs: their time and level, which of them are shown, and repeated ones as one. Pure, apart from the local
time zone.

Services, vLLM, NATS and circusd each have a format of their own. A line without a level, as of a traceback, belongs to
the one before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

LEVELS = ("debug", "info", "warning", "error")

_TIME = re.compile(r"^\D{0,40}?(?:\[\d+\] )?(\d{4})[-/](\d\d)[-/](\d\d)[ T](\d\d):(\d\d):(\d\d)")
_LEVEL = re.compile(r"(?:\b(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b|\[(DBG|INF|WRN|ERR|FTL)\])")
_LEVEL_WITHIN = 60
"""Number of characters at the beginning of a line within which its level stands."""

_RANKS = {
    **{"DEBUG": 0, "DBG": 0, "INFO": 1, "INF": 1, "WARNING": 2, "WRN": 2},
    **{"ERROR": 3, "ERR": 3, "CRITICAL": 3, "FTL": 3},
}
_CHANGING = re.compile(r"^\D{0,40}?(?:\[\d+\] )?[\d/: ,.T-]{8,27}")


def level_of(line: str) -> int | None:
    """Return the rank of a line's level in `LEVELS`; None if it has none."""
    if line.startswith("error: "):
        return 3
    match = _LEVEL.search(line, 0, _LEVEL_WITHIN)
    return None if match is None else _RANKS[match[1] or match[2]]


def time_of(line: str) -> float | None:
    """Return the Unix time of a line, in seconds; None if it has none."""
    match = _TIME.match(line)
    if match is None:
        return None
    try:
        return datetime(*map(int, match.groups())).astimezone().timestamp()  # type: ignore[arg-type]  # six numbers
    except ValueError:
        return None


@dataclass
class Selection:
    """Selects the lines of one log by their age and level. `cutoff` is Unix time, in seconds; None: no bound."""

    cutoff: float | None = None
    level: str | None = None
    _time: float | None = field(default=None, init=False)
    _level: int | None = field(default=None, init=False)

    def of(self, lines: Iterable[str]) -> list[str]:
        """Return the lines to show, which follow on those of the last call."""
        return [line for line in lines if self._keeps(line)]

    def _keeps(self, line: str) -> bool:
        level, time = level_of(line), time_of(line)
        self._level = self._level if level is None else level
        self._time = self._time if time is None else time
        least = 0 if self.level is None else LEVELS.index(self.level)
        # What has no level or time yet is shown only if nothing is asked for.
        recent = self.cutoff is None or (self._time is not None and self._time >= self.cutoff)
        return recent and (least == 0 or (self._level is not None and self._level >= least))


@dataclass
class Repeats:
    """Replaces lines of one log that repeat the previous one, but for the time, by their number."""

    _last: str = field(default="", init=False)
    _times: int = field(default=0, init=False)

    def of(self, lines: Iterable[str]) -> list[str]:
        """Return the lines to show. A number follows once another line comes."""
        shown: list[str] = []
        for line in lines:
            message = _CHANGING.sub("", line)
            if message and message == self._last:
                self._times += 1
                continue
            shown += [*self.end(), line]
            self._last = message
        return shown

    def end(self) -> list[str]:
        """Return the number of the repeated lines that were not shown, as a line; nothing if there are none."""
        times, self._times = self._times, 0
        return [f"(the last line {times} more {'time' if times == 1 else 'times'})"] if times else []
