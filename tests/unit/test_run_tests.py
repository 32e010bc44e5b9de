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
"""


def run(project: Path, text: str, *arguments: str) -> tuple[int, list[str]]:
    """Run a project that has one file of tests; returns the exit code and the lines of the output."""
    (project / "scripts").mkdir()
    for name in ("__init__", "outcomes", "run_tests"):
        shutil.copy(ROOT / "scripts" / f"{name}.py", project / "scripts")
    (project / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (project / "test_it.py").write_text(text)
    before = tuple(argument for argument in arguments if argument == "--repeat-failed")
    after = arguments[len(before) :]
    command = [sys.executable, "-m", "scripts.run_tests", *before, "e2e", "--", "test_it.py", *after]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=project, env=environ, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines()


def test_every_folder_with_tests_is_run() -> None:
    tests = ROOT / "tests"
    folders = {f"tests/{file.relative_to(tests).parts[0]}" for file in tests.rglob("test_*.py")}
    assert folders == {arguments[0] for arguments in SUITES.values()}


@pytest.mark.parametrize("workers", [(), ("--numprocesses=2",)], ids=["one process", "side by side"])
def test_every_test_is_counted_once(tmp_path: Path, workers: tuple[str, ...]) -> None:
    code, lines = run(tmp_path, TESTS, *workers)
    assert code == 1
    assert lines[-1] == "1 passed, 3 failed, 1 skipped"
    failed = [line.removeprefix("failed: test_it.py::") for line in lines if line.startswith("failed: ")]
    assert sorted(failed) == ["test_bad", "test_without_set_up", "test_without_tear_down"]


def test_a_failed_test_is_repeated_alone_and_called_flaky(tmp_path: Path) -> None:
    code, lines = run(tmp_path, FLAKY, "--repeat-failed")
    assert code == 0
    assert lines[-1] == "1 passed, 0 failed, 0 skipped"
    assert lines[-2].startswith("flaky: test_it.py::test_flaky ")


def test_one_that_fails_again_has_failed(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "def test_bad():\n    assert False\n", "--repeat-failed")
    assert code == 1
    assert lines[-1] == "0 passed, 1 failed, 0 skipped"
    assert not [line for line in lines if line.startswith("flaky: ")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import os\ndef test_that_kills():\n    os._exit(3)\n", "failed: pytest, as pytest ended with 3"),
        ("import nothing_of_this_name\n", "failed: pytest, as pytest ended with 2"),
        ("", "failed: pytest, as no test was found"),
    ],
    ids=["it dies", "it cannot be collected", "nothing is there"],
)
def test_a_run_that_does_not_get_to_its_end_fails(tmp_path: Path, text: str, says: str) -> None:
    code, lines = run(tmp_path, text)
    assert code == 1
    assert says in lines


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
