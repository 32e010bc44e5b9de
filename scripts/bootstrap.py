"""Make `.venv` at the root of the checkout what the lock files say. Standard library only.

Run by scripts/setup. pip installs uv, uv installs the rest. Nothing is done when the stamp in `.venv` says that it
is up to date. The stamp is removed before any change and written last, so that an interrupted set-up is done again;
what was fetched by then is in uv's cache. One set-up at a time: others wait for it.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from scripts.uv import SetupError, Uv, plain_environ

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30
NEEDED_GIB = {"cpu": 3.5, "cuda": 14.0}
"""Free space needed for a new `.venv`, and for uv's cache where that is on another file system. For cpu 3 were
measured; for cuda it is an estimate."""


@dataclass(frozen=True)
class Stamp:
    """What a finished `.venv` was made from."""

    extra: str
    python: str
    root: str
    """A virtual environment does not survive being moved: its scripts name its place."""
    lock: str
    project: str


def digest(*paths: Path) -> str:
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()


def lock_files(root: Path, extra: str) -> tuple[Path, ...]:
    """The files to install from: the lock, and what has a file of its own."""
    folder = root / "requirements"
    return (folder / f"{extra}.lock", *sorted(folder.glob(f"{extra}-*.lock")))


def wanted_stamp(root: Path, extra: str) -> Stamp:
    return Stamp(
        extra=extra,
        python="{}.{}".format(*sys.version_info),
        root=str(root),
        lock=digest(*lock_files(root, extra)),
        project=digest(root / "pyproject.toml"),
    )


def read_stamp(venv: Path) -> Stamp | None:
    """The stamp of a finished, working `.venv`; None when it must be made anew."""
    try:
        if not (venv / "bin" / "python").exists():
            return None
        return Stamp(**json.loads((venv / "setup.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write_stamp(venv: Path, stamp: Stamp) -> None:
    new = venv / "setup.json.new"
    new.write_text(json.dumps(asdict(stamp), indent=1))
    new.replace(venv / "setup.json")


@contextmanager
def one_at_a_time(root: Path) -> Iterator[None]:
    """Hold the checkout's set-up lock. Released by the kernel when the process ends, however it ends."""
    folder = os.open(root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another set-up is at work in this checkout; waiting for it.", flush=True)
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def check_machine() -> None:
    """The locks hold wheels for Linux on x86-64 with glibc; anything else would fail late and obscurely."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
        raise SetupError(
            f"the locked packages are for Linux on x86_64 with glibc, this is {sys.platform} on {platform.machine()}; "
            "use such a machine (e.g. Debian or Ubuntu), or install without the lock: pip install '.[cpu]'"
        )


def check_link(venv: Path, stamp: Stamp | None) -> None:
    """A `.venv` that is a link does not lead to the environment of another checkout, which would be cleared."""
    if venv.is_symlink() and stamp is not None and Path(stamp.root) != venv.parent:
        raise SetupError(f"{venv} is a link to the environment of {stamp.root}; remove the link, and run again")


def check_folders(extra: str, *folders: Path) -> None:
    """Checks that each folder can be written, with enough space for the packages. uv links them from its cache where it
    can."""
    for folder in folders:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not os.access(there, os.W_OK):
            raise SetupError(f"{folder} cannot be written; set UV_CACHE_DIR to a folder for uv's cache, and run again")
        space = os.statvfs(there)
        free = space.f_bavail * space.f_frsize / GIB
        if free < NEEDED_GIB[extra]:
            raise SetupError(
                f"{NEEDED_GIB[extra]:g} GiB are needed in {folder}, {free:.1f} are free; make room "
                "(UV_CACHE_DIR moves uv's cache), and run again"
            )


def make_venv(venv: Path) -> None:
    """An empty virtual environment with pip. What an unfinished set-up left is removed; a link to a folder is kept."""
    if venv.is_dir() and not venv.is_symlink():
        shutil.rmtree(venv)
    command = [sys.executable, "-m", "venv", "--clear", str(venv)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        print(done.stdout, end="", file=sys.stderr)
        raise SetupError("the virtual environment could not be made; try another Python: make setup PYTHON=...")


def install_uv(venv: Path, lock: Path) -> None:
    """uv as the lock has it, by pip: it is a package like any other."""
    (entry,) = re.findall(r"^uv==.*(?:\n .*)*", lock.read_text(), re.MULTILINE)
    requirement = venv / "uv.txt"
    requirement.write_text(f"{entry}\n")
    command = [str(venv / "bin" / "python"), "-I", "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    command += ["--no-deps", "--require-hashes", "-r", str(requirement)]
    if subprocess.run(command, env=plain_environ(), check=False).returncode != 0:
        raise SetupError(
            "pip could not install uv, for the reason above; connect to the network, or set PIP_INDEX_URL to an index "
            "within reach, and run again"
        )


def install_packages(venv: Path, root: Path, extra: str) -> None:
    """Everything that the lock names and nothing else."""
    lock, *apart = lock_files(root, extra)
    install_uv(venv, lock)
    uv = Uv(venv)
    check_folders(extra, venv, uv.cache())
    torch = [option for path in apart for option in uv.torch_options(path.read_text())]
    if not uv.pip("sync", "--no-build", "--compile-bytecode", *torch, lock, *apart):
        raise SetupError(
            f"uv could not install {lock.relative_to(root)}, for the reason above; run again to go on. Without the "
            "public indexes: set PIP_INDEX_URL to one within reach, PIP_FIND_LINKS to a folder with torch's wheel"
        )


def install_project(venv: Path, root: Path) -> None:
    """The checkout itself, editable, built with what the lock installed: no network."""
    if not Uv(venv).pip("install", "--quiet", "--offline", "--no-deps", "--no-build-isolation", "-e", root):
        raise SetupError(f"{root} could not be installed into {venv}, for the reason above")


def set_up(root: Path, extra: str | None, keep_python: bool, *, only_check: bool = False) -> bool:
    """Bring `.venv` up to date; with `only_check` say only whether it is.

    `extra` None keeps what is there, `cpu` at first; Stamp says what counts.
    """
    venv = root / ".venv"
    have = read_stamp(venv)
    want = wanted_stamp(root, extra or (have.extra if have else "cpu"))
    if have and keep_python:
        want = replace(want, python=have.python)
    if have == want or only_check:
        return have == want
    check_machine()
    check_link(venv, have)
    anew = have is None or (have.python, have.root) != (want.python, want.root)
    changed = have is None or have.lock != want.lock
    (venv / "setup.json").unlink(missing_ok=True)
    if anew:
        make_venv(venv)
    if anew or changed:
        print(f"Setting up .venv for {want.extra}: some minutes, once.", flush=True)
        if extra is None and want.extra == "cpu" and Path("/proc/driver/nvidia/version").exists():
            print("  (an NVIDIA GPU is here: `make setup EXTRA=cuda` sets up for it instead)", flush=True)
        install_packages(venv, root, want.extra)
    install_project(venv, root)
    write_stamp(venv, want)
    print(f"Set up: {venv}", flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/setup", description=__doc__.partition("\n")[0])
    parser.add_argument("--extra", choices=sorted(NEEDED_GIB), help="vLLM's build (default: as before, cpu at first)")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 0 if `.venv` is up to date")
    options = parser.parse_args()
    keep_python = not os.environ.get("PYTHON")
    try:
        if options.check:
            return int(not set_up(ROOT, options.extra, keep_python, only_check=True))
        with one_at_a_time(ROOT):
            set_up(ROOT, options.extra, keep_python)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.filename or ROOT}: {error.strerror}; mend that and run again", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nerror: interrupted; run again to finish the set-up", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
