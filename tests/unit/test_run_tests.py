"""What runs lint and tests: it runs all of them, counts them, and passes only if they do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts import lanes, run_tests
from scripts.lanes import Item, Turn
from scripts.outcomes import Outcomes, part_of
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
    shutil.copytree(ROOT / "scripts", project / "scripts")
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
    monkeypatch.setattr(run_tests, "run_sides", lambda arguments, sides: [(code, Outcomes(passed=["a"]))])
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
    failed = [f"test_{number}.py" for number in range(MOST_REPEATED + 1)]
    report = Report()
    report.add(Outcomes(passed=["a"], failed=failed))
    report.repeat(lambda test: pytest.fail("it was repeated"))
    assert report.failed == failed
    assert report.lines()[-1] == f"1 passed, {len(failed)} failed, 0 skipped"


def test_only_those_that_pass_are_flaky() -> None:
    report = Report()
    report.add(Outcomes(passed=["a"], failed=["b.py", "c.py"], skipped=["d"]))
    report.repeat(lambda test: test == "b.py")
    assert (report.passed, report.failed, report.flaky) == (2, ["c.py"], ["b.py"])
    assert report.exit_code == 1


def test_what_is_no_reason_to_fail_is_said_and_blocks_nothing() -> None:
    report = Report()
    report.add(Outcomes(passed=["a"], failed=["b.py"]), blocks=False)
    report.add_broken("clients, which ended with 1", blocks=False)
    report.repeat(lambda test: False)
    assert report.exit_code == 0
    assert report.lines() == [
        "not blocking: failed: b.py",
        "not blocking: failed: clients, which ended with 1",
        "1 passed, 0 failed, 0 skipped",
    ]


def test_the_touched_lane_blocks_and_the_slice_does_not() -> None:
    touched, extra = (Item(f"tests/e2e/test_{name}.py", "long", "e2e", (name,), 1.0) for name in ("a", "b"))
    options = run_tests.parse(["lint"])
    runs = run_tests.chosen_runs(options, Turn(0, 1, (touched,), (extra,), ()))
    assert [(run.arguments[-1], run.blocks) for run in runs] == [("a", True), ("b", False)]


def test_a_run_of_ci_has_every_suite_and_says_what_did_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(run_tests, "run_suite", lambda report, run: ran.append(run.name))
    monkeypatch.setattr(run_tests, "BIN", Path("/bin"))
    monkeypatch.setattr(run_tests, "LINT", {"good": ("true",)})
    monkeypatch.setattr(run_tests, "imported", lambda wanted: nullcontext())
    monkeypatch.setenv("SLICE", "1")
    monkeypatch.setenv("BASE", "HEAD")
    assert run_tests.main(["--turn"]) == 0
    assert ran[: len(SUITES)] == [*SUITES]
    assert len(ran) > len(SUITES)
    assert sum(line.startswith("not run: ") for line in capsys.readouterr().out.splitlines()) == 2


def test_one_slice_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLICE", "2")
    items = lanes.items(ROOT, lanes.read_seconds())
    expected = run_tests.nightly_runs(lanes.slices(items)[1])
    assert run_tests.chosen_runs(run_tests.parse(["nightly"]), None) == expected


@pytest.mark.parametrize(
    ("changed", "chosen"),
    [
        (
            frozenset({"dynamo_local/core/routing/ledger.py"}),
            {"tests/unit/core/routing/test_ledger.py", "tests/unit/docs/test_links.py"},
        ),
        (frozenset({"benchmarks/routing/thrash.py"}), {"tests/unit/benchmarks/routing/test_thrash.py"}),
        (frozenset({"pyproject.toml"}), {"tests/unit"}),
        (None, {"tests/unit"}),
    ],
)
def test_unit_tests_are_those_that_the_change_touches(changed: frozenset[str] | None, chosen: set[str]) -> None:
    found = set(run_tests.suite_run("unit", changed).arguments)
    assert chosen <= found
    assert ("tests/unit" in found) == ("tests/unit" in chosen)


def test_a_part_of_the_tests_can_be_run(tmp_path: Path) -> None:
    code, lines = run(tmp_path, TESTS, "--part=1/5")
    assert (code, lines[-1]) == (0, "1 passed, 0 failed, 0 skipped")


@given(st.integers(0, 50), st.integers(1, 9))
def test_parts_have_everything_once(length: int, count: int) -> None:
    parts = [range(length)[part_of(length, f"{number}/{count}")] for number in range(1, count + 1)]
    assert [each for part in parts for each in part] == [*range(length)]
