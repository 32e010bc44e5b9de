"""The conditions for forking a service's process, and the environment that it gets."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

from dynamo_local.process.forkserver.preload import Preloaded

CWD = str(Path.cwd())


class Heavy(ModuleType):
    """A preload with everything that one may have."""

    READ_LATER = ("THREADS",)
    objection: str | None = None

    def unfit(self) -> str | None:
        return self.objection


@pytest.fixture
def heavy() -> Heavy:
    return Heavy("heavy")


def preloaded(heavy: Heavy, given: Mapping[bytes, bytes]) -> Preloaded:
    return Preloaded((heavy, ModuleType("plain")), given, CWD)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show one thread only, as in a fork server: the test run itself has several."""
    monkeypatch.setattr(Path, "iterdir", lambda _: iter([Path("1")]))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({b"A": b"1"}, None),
        ({b"A": b"1", b"THREADS": b"4", b"DYN_WATCHER": b"ns_W", b"_": b"/bin/x"}, None),
        ({b"A": b"2"}, "A"),
        ({}, "A"),
        ({b"A": b"1", b"B": b"1"}, "B"),
    ],
)
def test_only_what_is_read_later_may_differ(heavy: Heavy, environ: dict[bytes, bytes], named: str | None) -> None:
    objection = preloaded(heavy, {b"A": b"1"}).objection(environ, CWD)
    assert objection == (named and f"its environment differs in {named}, which may have been read at import")


@pytest.mark.usefixtures("alone")
def test_a_module_may_object(heavy: Heavy) -> None:
    heavy.objection = "a GPU is open in it"
    assert preloaded(heavy, {}).objection({}, CWD) == "a GPU is open in it"


def test_another_directory_and_threads_are_objections(heavy: Heavy) -> None:
    assert "working directory" in str(preloaded(heavy, {}).objection({}, "/elsewhere"))
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert "threads run in it" in str(preloaded(heavy, {}).objection({}, CWD))
    finally:
        done.set()
        thread.join()


def test_what_imports_have_set_counts_unless_it_differs_on_purpose(
    heavy: Heavy, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**os.environb, b"THREADS": b"8", b"KEPT": b"1"}
    for name, value in (("SET", "import"), ("THREADS", "import"), ("KEPT", "1")):
        monkeypatch.setenv(name, value)
    environ = preloaded(heavy, given).environ_for({**given, b"THREADS": b"2"})
    assert (environ[b"SET"], environ[b"THREADS"], environ[b"KEPT"]) == (b"import", b"2", b"1")
