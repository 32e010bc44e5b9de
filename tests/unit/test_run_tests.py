"""What runs lint and tests: it runs all of them, counts them, and passes only if they do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import run_tests
from scripts.outcomes import Outcomes
from scripts.run_tests import MOST_REPEATED, ROOT, SUITES, Report

TESTS = """
from pathlib import Path
import pytest

@pytest.fixture
def broken_set_up():
    raise OSError

@pytest.fixture
def broken_tear_down():
    yield
    raise OSError

def test_good():
    pass

def test_bad():
    assert False

@pytest.mark.skip(reason="a reason")
def test_skipped():
    pass

def test_without_set_up(broken_set_up):
    pass

def test_without_tear_down(broken_tear_down):
    pass
"""
FLAKY = """
from pathlib import Path

def test_flaky():
    marker = Path(__file__).with_name("ran before")
    ran_before = marker.exists()
    marker.touch()
    assert ran_before

def test_bad():
    assert False
"""


def run(project: Path, text: str, *arguments: str) -> tuple[int, list[str]]:
    """Run a project that has one file of tests; returns the exit code and the lines of the output."""
    (project / "scripts").mkdir()
    for name in ("__init__", "outcomes", "run_tests"):
        shutil.copy(ROOT / "scripts" / f"{name}.py", project / "scripts")
    shutil.copytree(ROOT / "scripts" / "in_processes", project / "scripts" / "in_processes")
    (project / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (project / "test_it.py").write_text(text)
    before = tuple(argument for argument in arguments if argument == "--repeat-failed")
    after = arguments[len(before) :]
    command = [sys.executable, "-m", "scripts.run_tests", *before, "e2e", "--", "test_it.py", *after]
    environ = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "DYN_RECORD"}}
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    done = subprocess.run(command, cwd=project, env=environ, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines()


def test_every_folder_with_tests_is_run() -> None:
    tests = ROOT / "tests"
    folders = {f"tests/{file.relative_to(tests).parts[0]}" for file in tests.rglob("test_*.py")}
    assert folders == {arguments[0] for arguments in SUITES.values()}


def test_every_test_is_counted_once(tmp_path: Path) -> None:
    code, lines = run(tmp_path, TESTS, "-p", "xdist", "--numprocesses=2")
    assert code == 1
    assert lines[-1] == "1 passed, 3 failed, 1 skipped"
    failed = [line.removeprefix("failed: test_it.py::") for line in lines if line.startswith("failed: ")]
    assert sorted(failed) == ["test_bad", "test_without_set_up", "test_without_tear_down"]


def test_failed_tests_are_repeated_and_called_flaky_if_they_pass(tmp_path: Path) -> None:
    code, lines = run(tmp_path, FLAKY, "--repeat-failed")
    assert code == 1
    flaky, failed, last = lines[-3:]
    assert flaky.startswith("flaky: test_it.py::test_flaky ")
    assert failed == "failed: test_it.py::test_bad"
    assert last == "1 passed, 1 failed, 0 skipped"


def test_a_file_that_cannot_be_collected_has_failed(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "import nothing_of_this_name\n")
    assert code == 1
    assert "failed: test_it.py" in lines
    assert lines[-1] == "0 passed, 1 failed, 0 skipped"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (3, "failed: unit, as pytest ended with 3"),
        (-11, "failed: unit, as pytest ended with -11"),
        (5, "failed: unit, as no test was found"),
        (1, "failed: unit, as pytest ended with 1"),
    ],
)
def test_a_run_that_does_not_get_to_its_end_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int, says: str
) -> None:
    monkeypatch.setattr(run_tests, "run_pytest", lambda arguments: (code, Outcomes(passed=["a"])))
    assert run_tests.main(["unit", "--repeat-failed"]) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [says, "1 passed, 0 failed, 0 skipped"]


def test_lint_that_fails_fails_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(run_tests, "BIN", Path("/bin"))
    monkeypatch.setattr(run_tests, "LINT", {"good": ("true",), "bad": ("sh", "-c", "echo here it is; exit 1")})
    assert run_tests.main(["lint"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert "here it is" in said
    assert "failed: bad" in said
    assert said[-1] == "0 passed, 0 failed, 0 skipped"


def test_many_failures_are_not_repeated() -> None:
    failed = [f"test {number}" for number in range(MOST_REPEATED + 1)]
    report = Report()
    report.add(Outcomes(passed=["a"], failed=failed))
    report.repeat(lambda test: pytest.fail("it was repeated"))
    assert report.failed == failed
    assert report.lines()[-1] == f"1 passed, {len(failed)} failed, 0 skipped"


def test_only_those_that_pass_are_flaky() -> None:
    report = Report()
    report.add(Outcomes(passed=["a"], failed=["b", "c"], skipped=["d"]))
    report.repeat(lambda test: test == "b")
    assert (report.passed, report.failed, report.flaky) == (2, ["c"], ["b"])
    assert report.exit_code == 1
