"""Resolve the dependencies of pyproject.toml into the lock files of requirements/.

    make lock                  keep every version that still fits, change what pyproject.toml asks for
    make lock ARGS=--upgrade   take the newest of everything

uv resolves, from wheels alone, for Linux x86-64 and every Python in PYTHONS; nothing is installed. A version that is
kept keeps its hashes; a new one gets those of all its files. LOCKS decides which packages are excluded
(docs/internals/dependencies.md).
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.uv import Uv

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "requirements"
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORM = "x86_64-manylinux_2_31"
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
        extras=("cpu", "ray", "dev"),
        excluded={
            "torchvision": "built for CUDA: importing it breaks transformers on CPU torch; text needs none",
            "torchaudio": "the same",
            "torchcodec": "the same",
            "triton": "1 GB; compiles GPU kernels; vLLM disables it on a CPU, xgrammar uses it on GPUs only",
            "nixl-cu13": "nixl asks for two builds of one library; the cu12 one is used and needs no GPU",
        },
        apart=("torch",),
    ),
    "cuda": Lock(extras=("cuda", "ray", "dev"), also=("torch!=2.13.0+cpu",)),
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


def entries_in(text: str) -> dict[str, str]:
    """Name -> its lines of a lock file: `name==version`, and the hashes below."""
    return {entry.partition("==")[0]: entry for entry in re.findall(r"^[\w.-]+==.*(?:\n .*)*", text, re.MULTILINE)}


def version_in(entry: str) -> str:
    return entry.partition("==")[2].split()[0]


def resolve_for(
    python: str, inputs: list[str], excluded: Iterable[str], keep: Mapping[str, str], torch: Iterable[str]
) -> dict[str, str]:
    """The entry of every package that this Python needs, with the versions of `keep` where they fit.

    Ends the program if nothing fits.
    """
    with tempfile.TemporaryDirectory() as folder:
        output, excludes = Path(folder, "lock"), Path(folder, "excludes")
        # uv keeps the versions and hashes that it finds in its output file.
        output.write_text("\n".join(keep.values()))
        excludes.write_text("\n".join(excluded))
        options = [*torch, "--quiet", "--no-header", "--no-annotate", "--generate-hashes", "--only-binary=:all:"]
        options += [f"--python-version={python}", f"--python-platform={PLATFORM}"]
        options += [f"--excludes={excludes}", f"--output-file={output}"]
        if not Uv(Path(sys.prefix)).pip("compile", "-", *options, requirements="\n".join(inputs)):
            raise SystemExit(f"error: uv could not resolve the requirements for Python {python}, for the reason above")
        return entries_in(output.read_text())


def resolve(lock: Lock, inputs: list[str], keep: Mapping[str, str], torch: Iterable[str] = ()) -> dict[str, str]:
    """The entry of every package that some Python needs, of one version for all of them.

    Packages that are apart are resolved for the oldest Python alone: their index may lack wheels for the others.
    `torch`: uv's options to find torch.
    """
    for _ in range(5):
        answers: list[dict[str, str]] = []
        found: dict[str, str] = {}
        for python in PYTHONS:
            excluded = [*lock.excluded, *(lock.apart if answers else ())]
            answers.append(resolve_for(python, inputs, excluded, {**keep, **found}, torch))
            found |= answers[-1]
        if all(each.items() <= found.items() for each in answers):
            return dict(sorted(found.items()))
        keep = found
    raise SystemExit("error: the requirements of different Python versions do not settle")


def header(name: str, inputs: list[str]) -> str:
    return f"# Made by scripts/lock.py for the `{name}` set-up; do not edit.\n# inputs: {digest_of(inputs)}\n"


def write_lock(name: str, lock: Lock, upgrade: bool) -> None:
    inputs = inputs_of(lock, tomllib.loads((ROOT / "pyproject.toml").read_text()))
    paths = [FOLDER / f"{name}.lock", *(FOLDER / f"{name}-{package}.lock" for package in lock.apart)]
    keep = {} if upgrade else entries_in("\n".join(path.read_text() for path in paths if path.exists()))
    torch = Uv(Path(sys.prefix)).torch_options(paths[1].read_text()) if lock.apart else ()
    entries = resolve(lock, inputs, keep, torch)
    for package, path in zip(lock.apart, paths[1:], strict=True):
        path.write_text(header(name, inputs) + f"{package}=={version_in(entries.pop(package))}\n")
    paths[0].write_text(header(name, inputs) + "\n".join(entries.values()) + "\n")
    print(f"{paths[0].relative_to(ROOT)}: {len(entries)} packages")


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
