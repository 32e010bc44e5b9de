"""How far a download is, in words: a line that renews itself on a terminal, else a line every few seconds."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable
from typing import Protocol, TextIO

MB = 1_000_000
RATE_WINDOW_S = 5.0
LINE_EVERY_S = 2.5
_BAR_CELLS = 20
_ERASE = "\r\x1b[K"


class Steps(Protocol):
    """Shows lines. Part of `dynamo_local.supervisor.server.reports.report.Report`."""

    def step(self, text: str) -> None: ...


class Rate:
    """Bytes a second over the last seconds, from totals given with their times."""

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, now: float, total_bytes: int) -> None:
        self._samples.append((now, total_bytes))
        # The sample before the window stays, so that the window is covered whole.
        while len(self._samples) > 2 and self._samples[1][0] <= now - self._window_s:
            self._samples.popleft()

    def bytes_per_s(self) -> float | None:
        """None while there is nothing to compare."""
        if len(self._samples) < 2:
            return None
        (start, first), (end, last) = self._samples[0], self._samples[-1]
        return (last - first) / (end - start) if end > start else None


class DownloadProgress:
    """Shows the progress of one download. `terminal`: the stream to renew a line on, None to report lines."""

    def __init__(
        self, what: str, total_bytes: int, report: Steps, terminal: TextIO | None, clock: Callable[[], float]
    ) -> None:
        self._what = what
        self._total = total_bytes
        self._report = report
        self._terminal = terminal
        self._clock = clock
        self._rate = Rate()
        self._shown_at = clock()
        self._moved_at = clock()
        self._done: int | None = None

    def update(self, done_bytes: int) -> None:
        """Take the number of bytes there so far; show it if it is time to."""
        now = self._clock()
        if done_bytes != self._done:
            self._done, self._moved_at = done_bytes, now
        self._rate.add(now, done_bytes)
        text = progress_text(done_bytes, self._total, self._rate.bytes_per_s(), now - self._moved_at)
        if self._terminal is not None:
            self._renew(f"{bar(done_bytes, self._total)} {self._what}: {text}")
        elif now - self._shown_at >= LINE_EVERY_S:
            self._shown_at = now
            self._report.step(f"{self._what}: {text}")

    def note(self, text: str) -> None:
        """Show a line of its own, such as the reason of a delay."""
        self.close()
        self._report.step(text)

    def close(self) -> None:
        """Take the line from the terminal."""
        self._write(_ERASE)

    def _renew(self, text: str) -> None:
        columns = shutil.get_terminal_size().columns
        self._write(_ERASE + text[: columns - 1])

    def _write(self, text: str) -> None:
        if self._terminal is None:
            return
        try:
            self._terminal.write(text)
            self._terminal.flush()
        except OSError:
            self._terminal = None  # the terminal has gone; the download need not


def progress_text(done_bytes: int, total_bytes: int, bytes_per_s: float | None, silent_s: float) -> str:
    """For example "612 of 1,503 MB (40 %), 42 MB/s, 21 s left"."""
    share = f" ({100 * done_bytes // total_bytes} %)" if total_bytes else ""
    parts = [f"{done_bytes // MB:,} of {megabytes(total_bytes)}{share}"]
    if silent_s >= RATE_WINDOW_S:
        parts.append(f"no byte for {silent_s:.0f} s")
    elif bytes_per_s:
        parts += [f"{bytes_per_s / MB:.{0 if bytes_per_s >= 10 * MB else 1}f} MB/s"]
        parts += [f"{duration((total_bytes - done_bytes) / bytes_per_s)} left"]
    return ", ".join(parts)


def bar(done: int, total: int) -> str:
    """For example "[========            ]"."""
    filled = _BAR_CELLS * done // total if total else 0
    return f"[{'=' * filled}{' ' * (_BAR_CELLS - filled)}]"


def megabytes(size: int) -> str:
    """For example "1,503 MB". Rounded up: a file takes room."""
    return f"{-(-size // MB):,} MB"


def duration(seconds: float) -> str:
    """For example "21 s", "3 min 20 s", "2 h 05 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
