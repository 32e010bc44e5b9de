"""Resolve the dependencies of pyproject.toml into the lock files of requirements/.

    make lock                  keep every version that still fits, change what pyproject.toml asks for
    make lock ARGS=--upgrade   take the newest of everything

pip resolves, from wheels alone, and names the files' hashes in its report; nothing is installed. A lock
carries the hashes of the wheels for Linux x86-64 and every Python in PYTHONS, so that an install is the same
bytes wherever it is made. What docs/internals/dependencies.md says about excluded packages is decided in LOCKS.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "requirements"
PYTHONS = ("3.11", "3.12", "3.13")
GLIBC_MINORS = range(31, 4, -1)
"""Wheels may need glibc 2.31, no newer. llguidance needs as much."""


@dataclass(frozen=True)
class Lock:
    """What one lock file holds: the extras, less what is left out of them, each with its reason."""

    extras: tuple[str, ...]
    excluded: Mapping[str, str] = field(default_factory=dict)
    apart: tuple[str, ...] = ()
    """Packages of a file of their own, `{name}-{package}.lock`, without hashes: their index is not PyPI."""
    also: tuple[str, ...] = ()
    """Requirements beyond the extras, to steer the resolver."""


LOCKS: Mapping[str, Lock] = {
    "cpu": Lock(
        extras=("cpu", "dev"),
        excluded={
            "torchvision": "built for CUDA: importing it breaks transformers on CPU torch; text needs none",
            "torchaudio": "the same",
            "torchcodec": "the same",
            "triton": "1 GB; compiles GPU kernels; vLLM disables it on a CPU, xgrammar uses it on GPUs only",
            "nixl-cu13": "nixl asks for two builds of one library; the cu12 one is used and needs no GPU",
        },
        apart=("torch",),
    ),
    "cuda": Lock(extras=("cuda", "dev"), also=("torch!=2.13.0+cpu",)),
}


def inputs_of(lock: Lock, pyproject: Mapping[str, Any]) -> list[str]:
    """The requirements that the lock answers, sorted."""
    project = pyproject["project"]
    wanted = [*project["dependencies"], *lock.also]
    for extra in lock.extras:
        wanted += project["optional-dependencies"][extra]
    return sorted(set(wanted))


def digest_of(inputs: Iterable[str]) -> str:
    """Ties a lock file to the requirements it was made from."""
    return hashlib.sha256("\n".join(inputs).encode()).hexdigest()[:16]


def pins_in(text: str) -> dict[str, str]:
    """Canonical name -> version of each `name==version` line of a lock file."""
    pins: dict[str, str] = {}
    for line in text.splitlines():
        name, found, version = line.partition("==")
        if found and not line.startswith(("#", " ")):
            pins[canonicalize_name(name.strip())] = version.split()[0]
    return pins


def pip_report(arguments: list[str]) -> dict[str, dict[str, Any]]:
    """What pip would install: canonical name -> entry of its report. Ends the program when pip cannot."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--only-binary=:all:", f"--report={report}", f"--target={folder}/target", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"error: pip could not resolve the requirements\n{done.stderr[-3000:]}")
        entries = json.loads(report.read_text())["install"]
    return {canonicalize_name(entry["metadata"]["name"]): entry for entry in entries}


def closure(
    report: Mapping[str, Any], inputs: list[str], excluded: Iterable[str], python: str
) -> Iterator[Requirement]:
    """Every requirement met when walking from the inputs on that Python, not entering excluded packages."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    queue = [Requirement(text) for text in inputs]
    seen: set[tuple[str, str]] = set()
    while queue:
        wanted = queue.pop()
        name = canonicalize_name(wanted.name)
        if name in excluded:
            continue
        yield wanted
        for extra in ("", *sorted(wanted.extras)):
            if name not in report or (name, extra) in seen:
                continue
            seen.add((name, extra))
            for text in report[name]["metadata"].get("requires_dist") or ():
                child = Requirement(text)
                if child.marker is None or child.marker.evaluate({**environment, "extra": extra}):
                    queue.append(child)


def resolve(lock: Lock, inputs: list[str], keep: Mapping[str, str]) -> dict[str, str]:
    """Name -> version of everything the lock holds, the same for every Python."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("".join(f"{name}=={version}\n" for name, version in keep.items()))
        constraints.flush()
        for _ in range(5):
            report = pip_report(["-c", constraints.name, *inputs])
            met = {
                canonicalize_name(wanted.name): wanted
                for python in PYTHONS
                for wanted in closure(report, inputs, lock.excluded, python)
            }
            missing = [wanted for name, wanted in met.items() if name not in report]
            if not missing:
                return {name: report[name]["metadata"]["version"] for name in sorted(met)}
            inputs = inputs + [f"{wanted.name}{wanted.specifier}" for wanted in missing]
    raise SystemExit("error: the requirements of different Python versions do not settle")


def hashes_of(pins: Mapping[str, str], python: str) -> dict[str, str]:
    """Name -> sha256 of the wheel that this Python would install on Linux x86-64."""
    arguments = ["--no-deps", "--implementation=cp", f"--python-version={python}"]
    arguments += [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS]
    arguments += [f"--platform={name}_x86_64" for name in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
    report = pip_report([*arguments, *(f"{name}=={version}" for name, version in pins.items())])
    return {name: entry["download_info"]["archive_info"]["hashes"]["sha256"] for name, entry in report.items()}


def header(name: str, inputs: list[str]) -> str:
    return f"# Made by scripts/lock.py for the `{name}` set-up; do not edit.\n# inputs: {digest_of(inputs)}\n"


def write_lock(name: str, lock: Lock, upgrade: bool) -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    inputs = inputs_of(lock, pyproject)
    path = FOLDER / f"{name}.lock"
    keep = {} if upgrade or not path.exists() else pins_in(path.read_text())
    pins = resolve(lock, inputs, keep)
    for package in lock.apart:
        text = header(name, inputs) + f"{package}=={pins.pop(package)}\n"
        (FOLDER / f"{name}-{package}.lock").write_text(text)
    hashes: dict[str, set[str]] = {package: set() for package in pins}
    for python in PYTHONS:
        for package, sha256 in hashes_of(pins, python).items():
            hashes[package].add(sha256)
    lines = [
        f"{package}=={version}" + "".join(f" \\\n    --hash=sha256:{sha256}" for sha256 in sorted(hashes[package]))
        for package, version in pins.items()
    ]
    path.write_text(header(name, inputs) + "\n".join(lines) + "\n")
    print(f"{path.relative_to(ROOT)}: {len(pins)} packages")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(LOCKS), help="lock files to make (default: all)")
    parser.add_argument("--upgrade", action="store_true", help="forget the versions of the present lock files")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    for name in options.names:
        write_lock(name, LOCKS[name], options.upgrade)


if __name__ == "__main__":
    main()
