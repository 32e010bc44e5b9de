"""A pytest plugin that writes what became of each test: `pytest -p scripts.outcomes --outcomes=FILE`.

`--part=2/3` runs the second third of the tests.
Where processes note the lines that they run (scripts/mutants.py), it says for which test.
Where $DYN_RECORD names a file, it notes there what each test and each fixture took, too: scripts/timings.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from pathlib import Path

import msgspec
import pytest

from scripts.in_processes.probes import PROBES, begin_test
from scripts.in_processes.sitecustomize import LEAST_S, note

_TICKS = os.sysconf("SC_CLK_TCK")


class Outcomes(msgspec.Struct):
    """Node ids by what became of them. A file that cannot be collected counts as a test that failed."""

    passed: list[str] = []
    failed: list[str] = []
    skipped: list[str] = []


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process, of its living descendants, and of those that were waited for."""
    total = 0.0
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total = sum(map(int, fields[11:15])) / _TICKS
        for thread in Path(f"/proc/{pid}/task").iterdir():
            total += sum(cpu_seconds(int(child)) for child in (thread / "children").read_text().split())
    except OSError:
        # It has ended meanwhile.
        pass
    return total


class Recorder:
    """Notes the worst of each test's set-up, call and tear-down; writes the file when the session ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, str] = {}
        self._seconds: dict[str, dict[str, float]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._found[report.nodeid] = "failed"
        elif report.skipped or report.when == "call":
            self._found.setdefault(report.nodeid, report.outcome)
        seconds = self._seconds.setdefault(report.nodeid, {})
        seconds[str(report.when)] = report.duration
        if report.when == "teardown":
            cpu = sum(float(str(value)) for name, value in report.user_properties if name == "cpu")
            note("test", name=report.nodeid, outcome=self._found.get(report.nodeid), cpu=cpu, **seconds)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._found[report.nodeid] = "failed"

    def pytest_sessionfinish(self) -> None:
        outcomes = Outcomes()
        for test, outcome in self._found.items():
            getattr(outcomes, outcome).append(test)
        self._path.write_bytes(msgspec.json.encode(outcomes))


class Stopwatch:
    """Notes, in each process that runs tests, the CPU seconds of tests and the seconds of fixtures."""

    def __init__(self) -> None:
        self._cpu = cpu_seconds(os.getpid())

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> None:
        now = cpu_seconds(os.getpid())
        # Less than before: a process has been left to another parent.
        item.user_properties.append(("cpu", max(0.0, now - self._cpu)))
        self._cpu = now

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        began, cpu = time.monotonic(), cpu_seconds(os.getpid())
        try:
            return (yield)
        finally:
            seconds = time.monotonic() - began
            if seconds >= LEAST_S:
                cpu = cpu_seconds(os.getpid()) - cpu
                note("fixture", name=fixturedef.argname, scope=fixturedef.scope, seconds=seconds, cpu=cpu)


class Probes:
    """Has lines that are run, here and in processes that are started, noted for the test that runs."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        begin_test(nodeid)


def part_of(length: int, part: str) -> slice:
    """The items of a sequence that are a part of it: `2/3` is the second third."""
    number, count = map(int, part.split("/"))
    return slice(length * (number - 1) // count, length * number // count)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="file to write what became of each test to")
    parser.addoption("--part", help="run one part of the tests: NUMBER/COUNT, from 1")


def pytest_configure(config: pytest.Config) -> None:
    if "DYN_RECORD" in os.environ:
        config.pluginmanager.register(Stopwatch())
    if PROBES in os.environ:
        begin_test("")
        config.pluginmanager.register(Probes())
    path = config.getoption("--outcomes")
    # Workers of pytest-xdist report to the process that started them.
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(path))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, object, object]:
    """Leave the part that was asked for, of the tests in the order in which they would run."""
    result = yield
    part = config.getoption("--part")
    if part is not None:
        kept = items[part_of(len(items), part)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
    return result
