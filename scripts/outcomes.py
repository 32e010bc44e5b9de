"""A pytest plugin that writes what became of each test: `pytest -p scripts.outcomes --outcomes=FILE`."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest


class Outcomes(msgspec.Struct):
    """Node ids by what became of them. A file that cannot be collected counts as a test that failed."""

    passed: list[str] = []
    failed: list[str] = []
    skipped: list[str] = []


class Recorder:
    """Notes the worst of each test's set-up, call and tear-down; writes the file when the session ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._found[report.nodeid] = "failed"
        elif report.skipped or report.when == "call":
            self._found.setdefault(report.nodeid, report.outcome)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._found[report.nodeid] = "failed"

    def pytest_sessionfinish(self) -> None:
        outcomes = Outcomes()
        for test, outcome in self._found.items():
            getattr(outcomes, outcome).append(test)
        self._path.write_bytes(msgspec.json.encode(outcomes))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="file to write what became of each test to")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--outcomes")
    # Workers of pytest-xdist report to the process that started them.
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(path))
