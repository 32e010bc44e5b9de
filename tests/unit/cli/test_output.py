"""Lines of a report, on a terminal and elsewhere."""

from __future__ import annotations

import io
import itertools

import pytest

from dynamo_local.cli.output import Console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def console(monkeypatch: pytest.MonkeyPatch, stdout: io.StringIO) -> Console:
    monkeypatch.setattr("sys.stdout", stdout)
    monkeypatch.setenv("COLUMNS", "40")
    return Console(clock=map(float, itertools.count()).__next__)


def test_a_line_about_a_watcher_has_its_short_name(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = io.StringIO()
    report = console(monkeypatch, stdout)
    report.step("dynamo_VllmWorker_1  ended: exit code 1")
    report.step("the log is dynamo_VllmWorker_1.log")
    assert stdout.getvalue() == (
        "[   1.0s] VllmWorker_1  ended: exit code 1\n[   2.0s] the log is dynamo_VllmWorker_1.log\n"
    )


def test_without_a_terminal_what_is_awaited_is_a_line_and_repeats_are_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stdout = io.StringIO()
    report = console(monkeypatch, stdout)
    report.pending("waiting for A")
    report.pending("waiting for A")
    report.step("B  ready")
    report.pending("waiting for A")
    assert stdout.getvalue() == (
        "[   1.0s] waiting for A\n[   2.0s] still waiting\n[   3.0s] B  ready\n[   4.0s] waiting for A\n"
    )


def test_what_is_awaited_is_replaced_on_a_terminal_and_never_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = Terminal()
    report = console(monkeypatch, stdout)
    report.pending("waiting")
    report.pending("w" * 100)
    report.step("ready")
    report.say("done")
    first, second, third = stdout.getvalue().split("\r\033[K")[1:]
    assert first == "[   1.0s] waiting"
    assert len(second) == 39
    assert third == "[   3.0s] ready\ndone\n"
