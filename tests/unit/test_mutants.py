"""Changes that tests should notice: which can be made, which tests are run for them, and what is said of each."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts import changes, mutants
from scripts.mutants import Change, Copy, changes_of, chosen, draw, everyday_and_nightly, judge, probed, seen, watch
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


def test_tests_are_those_of_the_line_or_of_the_module_where_it_runs_at_import() -> None:
    texts = {"state/a.py": "LEAST = 1\n\ndef f():\n    return 2\n", "tests/unit/test_c.py": "import state.a"}
    constant, returned = changes_of("state/a.py", texts["state/a.py"].encode())
    assert chosen(constant, (), texts) == ["tests/unit/test_c.py"]
    assert chosen(returned, (), texts) == []
    both = {"tests/unit/test_a.py::test_b", "tests/integration/ray/test_ray_cluster.py::test_a"}
    assert everyday_and_nightly(chosen(returned, both, texts)) == (
        ["tests/unit/test_a.py::test_b"],
        ["tests/integration/ray/test_ray_cluster.py::test_a"],
    )


@pytest.mark.parametrize("path", ["dynamo_local/core/routing/ledger.py", "components/frontend/dispatcher.py"])
def test_a_module_with_probes_is_python_and_has_all_of_them(path: str) -> None:
    source = (ROOT / path).read_bytes()
    every = dict(enumerate(changes_of(path, source)))
    text = probed(source, every).decode()
    ast.parse(text)
    assert all(f"{mutants.HIT}({number})" in text for number in every)


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
    texts = changes.read_modules(project)
    source = texts["state/a.py"].encode()
    drawn = [*changes_of("state/a.py", source)]
    notes = project / "build" / "notes"
    assert watch(drawn, notes, ["tests/unit", "-q"]) == 0
    tests = seen(notes)
    with Copy() as copy:
        verdicts = [
            judge(copy, change, chosen(change, tests.get(number, ()), texts)) for number, change in enumerate(drawn)
        ]
        # It is undone afterwards.
        assert (copy.root / "state/a.py").read_bytes() == source
    by_line = {verdict.line: verdict for verdict in verdicts}
    assert {line: verdict.verdict for line, verdict in by_line.items()} == {4: "caught", 7: "caught", 10: "no test"}
    assert (by_line[4].by, by_line[7].by) == ("tests/unit/test_a.py::test_here", "tests/unit/test_a.py::test_there")
