"""The words for how far a download is."""

from __future__ import annotations

import io

import pytest

from dynamo_local.model.hub.download import DownloadProgress, bar, duration, progress_text

MB = 1_000_000


class Lines:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def step(self, text: str) -> None:
        self.lines.append(text)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (200, "3 min 20 s"), (61, "1 min 01 s"), (7500, "2 h 05 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("done", "total", "rate", "silent", "text"),
    [
        (612 * MB, 1503 * MB, 42.3 * MB, 0, "612 of 1,503 MB (40 %), 42 MB/s, 21 s left"),
        (0, 1503 * MB, None, 0, "0 of 1,503 MB (0 %)"),
        (5 * MB, 10 * MB, 1.25 * MB, 0, "5 of 10 MB (50 %), 1.2 MB/s, 4 s left"),
        (5 * MB, 10 * MB, 0.0, 7, "5 of 10 MB (50 %), no byte for 7 s"),
        (0, 0, None, 0, "0 of 0 MB"),
    ],
)
def test_progress(done: int, total: int, rate: float | None, silent: float, text: str) -> None:
    assert progress_text(done, total, rate, silent) == text


def test_the_bar_fills() -> None:
    assert [bar(0, 10), bar(5, 10), bar(10, 10), bar(0, 0)] == [
        "[" + "=" * filled + " " * (20 - filled) + "]" for filled in (0, 10, 20, 0)
    ]


def test_without_a_terminal_a_line_comes_every_few_seconds() -> None:
    clock, report = Clock(), Lines()
    progress = DownloadProgress("m", 100 * MB, report, None, clock)
    for second in range(11):
        clock.now = float(second)
        progress.update(10 * second * MB)
    assert report.lines[:2] == [
        "m: 30 of 100 MB (30 %), 10 MB/s, 7 s left",
        "m: 60 of 100 MB (60 %), 10 MB/s, 4 s left",
    ]
    assert len(report.lines) == 3


def test_on_a_terminal_one_line_is_renewed() -> None:
    clock, report, terminal = Clock(), Lines(), io.StringIO()
    progress = DownloadProgress("m", 100 * MB, report, terminal, clock)
    progress.update(50 * MB)
    assert terminal.getvalue().endswith("[==========          ] m: 50 of 100 MB (50 %)")
    progress.close()
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert not report.lines
