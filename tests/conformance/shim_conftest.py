"""Replaces vLLM's `tests/conftest.py`: limits the time of each test, and writes its outcome as a line of JSON."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from vllm.model_executor.model_loader import weight_utils
from vllm.transformers_utils import repo_utils

TEST_WITHIN_S = 60
MODEL = os.environ["CONFORMANCE_MODEL"]
RESULTS = Path(os.environ["CONFORMANCE_RESULTS"])
SELECTED = os.environ.get("CONFORMANCE_SELECTED")


class NothingThere:
    """Replaces a hub of adapters. Nothing is downloaded, so tests of adapters fail on every server."""

    def snapshot_download(self, *_: object, **__: object) -> str:
        return "/not-downloaded"


class LocalAssetServer:
    """Replaces a class that a fixture's annotation names. Without assets."""


class TooLongError(Exception):
    """A test has come to its limit."""


def download_nothing(*_: object, **__: object) -> str:
    return MODEL


vars(repo_utils)["hf_api"] = lambda *_, **__: NothingThere()
vars(weight_utils)["download_weights_from_hf"] = download_nothing


@pytest.fixture
def local_asset_server() -> LocalAssetServer:
    return LocalAssetServer()


def stop(*_: object) -> None:
    raise TooLongError(f"longer than {TEST_WITHIN_S} s")


def name_of(item: pytest.Item) -> str:
    """Return the name of a test as in the list of expectations."""
    return item.nodeid.replace(MODEL, "MODEL")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if SELECTED is not None:
        wanted = set(Path(SELECTED).read_text().splitlines())
        items[:] = [item for item in items if name_of(item) in wanted]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool | None, bool | None]:
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(TEST_WITHIN_S)
    try:
        return (yield)
    finally:
        signal.alarm(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" or (report.when == "setup" and not report.passed):
        outcome = report.outcome if report.when == "call" else f"{report.when} {report.outcome}"
        line = {"test": name_of(item), "outcome": outcome, "why": why(report, call)}
        with RESULTS.open("a") as results:
            results.write(json.dumps(line | {"seconds": round(report.duration, 2)}) + "\n")
    return report


def why(report: pytest.TestReport, call: pytest.CallInfo[None]) -> str:
    if report.passed:
        return ""
    text = str(call.excinfo.getrepr(style="value")) if report.failed and call.excinfo else str(report.longrepr)
    return text[-700:]
