"""Changes that tests should notice: which can be made, which tests are run for them, and what is said of each."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest
from coverage import CoverageData
from hypothesis import given
from hypothesis import strategies as st

from scripts import changes, mutants
from scripts.mutants import (
    Change,
    Copy,
    LineMap,
    changes_of,
    chosen,
    draw,
    everyday_and_nightly,
    judge,
    make_map,
    to_run,
)
from scripts.run_tests import ROOT

SOURCE = '''\
"""Ä module."""
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from x import y

LEAST: Literal[7] = 1
EVEN = True

async def f(a):
    """Not a constant: 1."""
    ü = "ö" if a > 2.5 else "ß"
    while (a
           and ü):
        logger.info("x")
        a.stop()
    await a.end(
        ü,
    )
    return g(a)
'''


def test_every_change_is_one_of_the_three_kinds_in_its_place() -> None:
    source = SOURCE.encode()
    found = {(c.kind, c.first, c.shown(source)) for c in changes_of("state/a.py", source)}
    assert found == {
        ("constant", 7, "1 -> 2"),
        ("constant", 8, "True -> False"),
        ("condition", 12, "a > 2.5 -> (not (a > 2.5))"),
        ("constant", 12, "2.5 -> 3.5"),
        ("condition", 13, "a and ü -> (not (a and ü))"),
        ("call", 16, "a.stop() -> pass"),
        ("call", 17, "await a.end( ü, ) -> pass"),
    }


@pytest.mark.parametrize("path", ["dynamo_local/core/routing/ledger.py", "components/frontend/dispatcher.py"])
def test_a_changed_module_is_python_still_and_another_one(path: str) -> None:
    source = (ROOT / path).read_bytes()
    every = [*changes_of(path, source)]
    assert len(every) > 10
    before = ast.dump(ast.parse(source))
    assert all(ast.dump(ast.parse(change.apply(source))) != before for change in every)


@given(st.integers(0, 30), st.integers())
def test_changes_are_drawn_once_each_and_the_same_by_the_same_seed(number: int, seed: int) -> None:
    every = [Change("a", kind, n, n, n, n, "") for n, kind in enumerate(["condition"] * 9 + ["call"] * 3)]
    drawn = draw(every, number, seed)
    assert len(set(drawn)) == len(drawn) == min(number, len(every))
    assert drawn == draw(every, number, seed)
    if number >= 6:
        assert sum(change.kind == "call" for change in drawn) == 3


def test_a_process_that_a_test_has_started_stands_for_its_whole_file() -> None:
    contexts = {"tests/a.py::test_1[x (call)]", "tests/b.py::test_1 (setup)", "tests/b.py::test_2"}
    assert to_run(contexts) == {"tests/a.py::test_1[x (call)]", "tests/b.py"}


def test_tests_are_those_of_the_line_or_of_the_module_where_it_runs_at_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    data = CoverageData(str(tmp_path / "map"))
    data.set_context("tests/integration/ray/test_ray_cluster.py::test_a")
    data.add_lines({str(tmp_path / "state/a.py"): [4]})
    data.set_context("tests/unit/test_a.py::test_b")
    data.add_lines({str(tmp_path / "state/a.py"): [4]})
    data.write()
    lines = LineMap(tmp_path / "map")
    texts = {"state/a.py": "LEAST = 1\n\ndef f():\n    return 2\n", "tests/unit/test_c.py": "import state.a"}
    constant, returned = changes_of("state/a.py", texts["state/a.py"].encode())
    assert chosen(constant, lines, texts) == ["tests/unit/test_c.py"]
    both = chosen(returned, lines, texts)
    assert everyday_and_nightly(both) == (
        ["tests/unit/test_a.py::test_b"],
        ["tests/integration/ray/test_ray_cluster.py::test_a"],
    )


def test_of_a_file_the_nightly_tests_come_after_the_others() -> None:
    file = "tests/e2e/models/test_fidelity.py"
    everyday, nightly = everyday_and_nightly([file])
    assert nightly == [f"{file}::test_each_row"]
    assert everyday == [file, f"--deselect={nightly[0]}"]


MODULE = """\
import sys

def here():
    return 1

def there():
    sys.exit(3)

def nowhere():
    return 5
"""
TESTS = """\
import subprocess, sys
from state import a

def test_here():
    assert a.here() == 1

def test_there():
    command = [sys.executable, "-c", "from state import a; a.there()"]
    assert subprocess.run(command).returncode == 3
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one module, of which one line is tested in its own process, one in another, and one not at all."""
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "FOLDER", tmp_path / "build")
    monkeypatch.setattr(mutants, "MAP", tmp_path / "build" / "map.coverage")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name, text in {
        "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\n',
        ".gitignore": "/build/\n",
        "state/__init__.py": "",
        "state/a.py": MODULE,
        "tests/unit/test_a.py": TESTS,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    changes.git(tmp_path, "init", "--quiet")
    return tmp_path


def test_what_is_changed_in_any_process_is_noticed_by_the_tests_that_run_it(project: Path) -> None:
    assert make_map(["tests/unit", "-q"]) == 0
    lines = LineMap(mutants.MAP)
    texts = changes.read_modules(project)
    source = texts["state/a.py"].encode()
    by_line = {change.first: change for change in changes_of("state/a.py", source)}
    with Copy() as copy:
        verdicts = [judge(copy, by_line[line], chosen(by_line[line], lines, texts)) for line in (4, 7, 10)]
        # It is undone afterwards.
        assert (copy.root / "state/a.py").read_bytes() == source
    assert [verdict.verdict for verdict in verdicts] == ["caught", "caught", "no test"]
    assert [verdict.by for verdict in verdicts[:2]] == [
        "tests/unit/test_a.py::test_here",
        "tests/unit/test_a.py::test_there",
    ]
