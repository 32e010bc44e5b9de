"""Which tests run every day and which in turn: each of them somewhere, in slices of a few minutes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts import lanes
from scripts.changes import (
    RECENT_S,
    UnknownChangeError,
    affected_tests,
    branch_base,
    changed_since,
    dependents,
    imported_by,
    recent_base,
    turn_of,
)
from scripts.lanes import COMMANDS, LANES, NIGHTLY, ROOT, SLICE_S, Item, items, read_seconds, slices, turn
from scripts.timings import Line, report

ITEMS = items(ROOT, read_seconds())
NAMES = st.text("abcdef", min_size=1, max_size=4).map(lambda name: f"tests/e2e/test_{name}.py")
SOME = st.lists(
    st.builds(Item, NAMES, st.sampled_from([*LANES]), st.just("e2e"), st.tuples(NAMES), st.floats(0, 400)),
    min_size=1,
    unique_by=lambda item: item.name,
)


def test_what_is_named_is_there() -> None:
    for target in NIGHTLY:
        path, _, test = lanes.arguments_of(target)[0].partition("::")
        assert (ROOT / path).exists(), target
        assert not test or f"def {test.partition('[')[0]}(" in (ROOT / path).read_text(), target
    assert {*NIGHTLY.values(), *(lane for lane, _ in COMMANDS.values())} <= set(LANES)
    for path in (path for paths in LANES.values() for path in paths):
        assert (ROOT / path).exists(), path


def test_every_day_leaves_out_what_is_nightly_and_nothing_else() -> None:
    left_out = [argument for suite in ("unit", "integration", "e2e") for argument in lanes.everyday(suite)]
    chosen_by_arguments = {"tests/e2e -m families", "tests/unit/core --hypothesis-profile=nightly"}
    assert sorted(argument.partition("=")[2] for argument in left_out) == sorted({*NIGHTLY} - chosen_by_arguments)


@pytest.mark.parametrize(
    ("test", "every_day"),
    [
        ("tests/integration/ray/test_ray_cluster.py::test_a", False),
        ("tests/integration/rays/test_it.py::test_a", True),
        ("tests/e2e/test_conformance.py::test_a", False),
        ("tests/unit/core/test_names.py::test_a", True),
    ],
)
def test_a_test_runs_every_day_unless_it_is_named(test: str, every_day: bool) -> None:
    assert lanes.runs_every_day(test) == every_day


def test_a_test_is_one_argument_of_pytest_whatever_its_parameters_are_called() -> None:
    assert all(item.arguments == (item.name,) for item in ITEMS if "::" in item.name)


@given(SOME)
def test_slices_have_everything_once_and_are_short(of: list[Item]) -> None:
    groups = slices(of)
    assert [item for group in groups for item in group] == of
    assert all(len(group) == 1 or sum(item.seconds for item in group) <= SLICE_S for group in groups)


@given(SOME)
def test_all_slices_in_turn_are_everything(of: list[Item]) -> None:
    count = len(slices(of))
    turns = [turn(of, number, ()) for number in range(7 * count, 8 * count)]
    ran = [item for each in turns for item in (*each.touched, *each.extra)]
    assert {item.name for item in ran} == {item.name for item in of}
    assert all(len(each.extra) + len(each.left_out) == len(of) for each in turns)


def test_a_change_has_its_lane_run_and_an_unknown_one_all() -> None:
    changed = ["dynamo_local/engine/vllm/engine.py"]
    found = turn(ITEMS, 0, changed)
    assert {item.lane for item in found.touched} == {"vllm"}
    assert all(item in found.touched for item in ITEMS if item.lane == "vllm")
    assert {item.lane for item in turn(ITEMS, 0, None).touched} == {*NIGHTLY.values()} - {"long"}
    assert turn(ITEMS, 0, ["dynamo_local/core/names.py", "tests/unit/core/test_names.py"]).touched == ()
    own = turn(ITEMS, 0, ["tests/integration/ray/test_ray_cluster.py"])
    assert [item.name for item in own.touched] == ["tests/integration/ray/test_ray_cluster.py"]


def test_what_takes_longer_than_a_slice_is_cut() -> None:
    name = "tests/integration/ray/test_ray_cluster.py"
    found = [item for item in items(ROOT, {name: 3 * 600.0}) if item.name.startswith(name)]
    assert [item.arguments[-1] for item in found] == ["--part=1/4", "--part=2/4", "--part=3/4", "--part=4/4"]
    assert all(item.seconds == 150 for item in found)


def test_seconds_come_from_a_record_and_stay_where_it_has_none() -> None:
    lines = [
        Line("test", name="tests/e2e/test_a.py::test_it[x]", setup=1.0, call=2.0),
        Line("test", name="tests/e2e/test_a.py::test_it[y]", call=2.0),
        Line("suite", name="clients (1 of 2)", seconds=10.0),
        Line("suite", name="clients (2 of 2)", seconds=20.0),
    ]
    names = ["tests/e2e/test_a.py", "tests/e2e/test_b.py", "tests/e2e/test_c.py", "clients"]
    found = lanes.recorded(lines, {"tests/e2e/test_b.py": 7.0, "tests/e2e/test_a.py": 1.0}, names)
    assert found == {"clients": 30.0, "tests/e2e/test_a.py": 5.0, "tests/e2e/test_b.py": 7.0}


def test_tables_of_a_record_have_sums_and_the_rest_in_one_row() -> None:
    tests = [Line("test", name=f"tests/unit/a/test_{n}.py::test_it", call=float(n), cpu=1.0) for n in range(5)]
    text = "\n".join(report([*tests, Line("suite", name="unit", seconds=9.0)], top=2))
    assert "| unit | 1 | 9.0 | 0.0 |" in text
    assert "| tests/unit/a | 5 | 10.0 | 5.0 |" in text
    assert "| tests/unit/a/test_4.py | 1 | 4.0 | 1.0 |\n| tests/unit/a/test_3.py | 1 | 3.0 | 1.0 |" in text
    assert "| 3 others | 3 | 3.0 | 3.0 |" in text


def test_imports_are_found_in_all_their_forms() -> None:
    text = (
        "import state.paths\nfrom dynamo_local.core import (\n    names,\n    errors,\n)\n"
        "def late():\n    from components.x import y\n"
        "run('-m', 'dynamo_local.cli.main')\nserve('examples.llm.g:Front')\n"
    )
    assert {
        "state.paths",
        "dynamo_local.core",
        "dynamo_local.core.names",
        "dynamo_local.core.errors",
        "components.x.y",
        "dynamo_local.cli.main",
        "examples.llm.g",
    } <= set(imported_by(text))


TEXTS = {
    "state/__init__.py": "",
    "state/a.py": "",
    "state/b.py": "from state import a",
    "tests/unit/conftest.py": "from state.b import c",
    "tests/unit/state/test_b.py": "",
    "tests/unit/test_tree.py": "",
    "tests/e2e/test_b.py": "import state.b",
}


def test_what_depends_on_a_module_comes_nearest_first() -> None:
    assert dependents(["state/a.py"], TEXTS)[:2] == ["state/a.py", "state/b.py"]
    assert set(dependents(["state/__init__.py"], TEXTS)) == {*TEXTS} - {"state/a.py"}


def test_a_conftest_brings_all_tests_below_it() -> None:
    assert affected_tests(["state/a.py"], TEXTS) == ["tests/unit/state/test_b.py", "tests/unit/test_tree.py"]
    assert affected_tests(["docs/index.md"], TEXTS) == ["tests/unit/test_tree.py"]
    assert affected_tests(["state/a.yaml"], TEXTS) is None


BEGAN = 1_700_000_000


def git(folder: Path, *arguments: str, at: int = BEGAN) -> str:
    names = {f"GIT_{who}_{what}": "a" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environ = {**os.environ, **names, "GIT_COMMITTER_DATE": f"@{at} +0000"}
    done = subprocess.run(["git", *arguments], cwd=folder, env=environ, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """A repository of three commits, each with a file: two within six hours of the last, one earlier."""
    folder = tmp_path / "history"
    folder.mkdir()
    git(folder, "init", "--quiet")
    for name, at in (("a", BEGAN), ("b", BEGAN + 1), ("c", BEGAN + RECENT_S)):
        (folder / name).touch()
        git(folder, "add", name)
        git(folder, "commit", "--quiet", "--message", name, at=at)
    return folder


def test_the_change_is_what_came_within_six_hours_and_what_is_not_committed(history: Path) -> None:
    (history / "d").touch()
    assert changed_since(history, recent_base(history)) == {"b", "c", "d"}
    assert turn_of(history) == 3


def test_a_clone_without_history_has_a_turn_and_no_base(history: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{history}", "shallow")
    with pytest.raises(UnknownChangeError, match="does not go back"):
        recent_base(tmp_path / "shallow")
    assert turn_of(tmp_path / "shallow") == int(git(history, "rev-parse", "HEAD")[:8], 16)


def test_the_change_of_a_branch_is_what_its_remote_has_not(history: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownChangeError):
        branch_base(history)
    git(tmp_path, "clone", "--quiet", str(history), "clone")
    clone = tmp_path / "clone"
    assert changed_since(clone, branch_base(clone)) == frozenset()
    git(clone, "rm", "--quiet", "a")
    git(clone, "commit", "--quiet", "--message", "without a")
    assert changed_since(clone, branch_base(clone)) == {"a"}


def test_a_folder_without_git_has_no_change(tmp_path: Path) -> None:
    with pytest.raises(UnknownChangeError):
        recent_base(tmp_path)
