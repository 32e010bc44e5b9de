"""Make `.venv` at the root of the checkout what the lock file says. Standard library only.

Run by scripts/setup. Nothing is done when the stamp in `.venv` says that it is up to date. The stamp is
removed before any change and written last, so that an interrupted set-up is done again. One set-up at a time:
others wait for it.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from scripts.pip_run import PipError, SetupError, pinned, run_pip

ROOT = Path(__file__).resolve().parent.parent
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's index of CPU wheels. Asked for torch alone, when pip's own configuration knows no such wheel."""

GIB = 1 << 30
VENV_GIB = {"cpu": 3.5, "cuda": 14.0}
DOWNLOAD_GIB = {"cpu": 1.5, "cuda": 8.0}
"""Free space needed in the checkout and, for pip's downloads, in the temporary folder. For cpu 2.8 and 0.7
were measured; for cuda it is an estimate."""


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
    """The files to install from, in order: what has a file of its own comes first."""
    folder = root / "requirements"
    return (*sorted(folder.glob(f"{extra}-*.lock")), folder / f"{extra}.lock")


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
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise SetupError(
            f"the locked packages are for Linux on x86_64, this is {sys.platform} on {platform.machine()}; "
            "use such a machine, or install without the lock: pip install '.[cpu]'"
        )
    if platform.libc_ver()[0] != "glibc":
        raise SetupError("the locked packages need glibc, which this Linux lacks; use e.g. Debian or Ubuntu")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        python = "python{}.{}".format(*sys.version_info)
        raise SetupError(
            f"{sys.executable} lacks the venv module; install it, on Debian and Ubuntu: sudo apt install {python}-venv"
        ) from error


def free_gib(path: Path) -> float:
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize / GIB


def check_space(extra: str, venv: Path, temporary: Path) -> None:
    """Enough for the packages and, on the same file system or another, for their downloads."""
    needs = {venv: VENV_GIB[extra], temporary: DOWNLOAD_GIB[extra]}
    if venv.stat().st_dev == temporary.stat().st_dev:
        needs = {venv: VENV_GIB[extra] + DOWNLOAD_GIB[extra]}
    for path, need in needs.items():
        free = free_gib(path)
        if free < need:
            hint = ", or set TMPDIR to a folder with more" if path == temporary else ""
            raise SetupError(f"{need:g} GiB are needed in {path}, {free:.1f} are free; make room{hint}, and run again")


def discard(venv: Path) -> None:
    """Remove what an unfinished set-up left, before space is counted. A link is kept, and emptied later."""
    if venv.is_dir() and not venv.is_symlink():
        shutil.rmtree(venv)


def make_venv(venv: Path) -> None:
    print("Making .venv", flush=True)
    command = [sys.executable, "-m", "venv", "--clear", str(venv)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        last = (done.stdout.strip() or "no output").splitlines()[-1]
        raise SetupError(f"the virtual environment could not be made ({last}); try another: make setup PYTHON=...")


def install_torch(venv: Path, lock: Path) -> None:
    """torch's CPU wheel is not on PyPI: found by pip's own configuration, else on PyTorch's index."""
    arguments = ["install", "--no-deps", "-r", str(lock)]
    try:
        run_pip(venv, arguments, lock)
    except PipError as first:
        if not first.not_found:
            raise
        print(f"  pip's own configuration has no such wheel; asking {PYTORCH_CPU_INDEX}", flush=True)
        try:
            run_pip(venv, [*arguments, "--index-url", PYTORCH_CPU_INDEX], lock)
        except PipError as second:
            if first.offline:
                raise first from second
            raise PipError(
                f"torch's CPU wheel is found neither by pip's own configuration nor at {PYTORCH_CPU_INDEX}; "
                "make that address reachable, or put the wheel in a folder and set PIP_FIND_LINKS to it",
                second.tail,
            ) from second


def install_locked(venv: Path, locks: Iterable[Path]) -> None:
    for lock in locks:
        if lock.stem.endswith("-torch"):
            install_torch(venv, lock)
        else:
            run_pip(venv, ["install", "--no-deps", "--require-hashes", "-r", str(lock)], lock)


def remove_others(venv: Path, locks: Iterable[Path]) -> None:
    """Uninstall what an earlier lock had and this one has not."""
    locked = set().union(*(pinned(lock) for lock in locks))
    command = [str(venv / "bin" / "python"), "-I", "-m", "pip", "list", "--format=json"]
    listed = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    names = {entry["name"].lower().replace("_", "-").replace(".", "-") for entry in listed}
    others = sorted(names - locked - {"pip", "dynamo-local"})
    if others:
        run_pip(venv, ["uninstall", "-y", *others])


def install_project(venv: Path, root: Path) -> None:
    """The checkout itself, editable, built with what the lock installed: no network."""
    run_pip(venv, ["install", "--no-deps", "--no-build-isolation", "--no-index", "-e", str(root)])


def set_up(root: Path, extra: str | None, keep_python: bool) -> None:
    """Bring `.venv` up to date. `extra` None keeps what is there, `cpu` at first; Stamp says what counts."""
    venv = root / ".venv"
    have = read_stamp(venv)
    want = wanted_stamp(root, extra or (have.extra if have else "cpu"))
    if have and keep_python:
        want = replace(want, python=have.python)
    if have == want:
        return
    check_machine()
    anew = have is None or (have.python, have.root) != (want.python, want.root)
    if anew:
        discard(venv)
    if anew or (have and have.lock != want.lock):
        install_packages(venv, root, want.extra, anew=anew, hint=extra is None)
    (venv / "setup.json").unlink(missing_ok=True)
    install_project(venv, root)
    write_stamp(venv, want)
    print(f"Set up: {venv}", flush=True)


def install_packages(venv: Path, root: Path, extra: str, *, anew: bool, hint: bool) -> None:
    """Everything that the lock names and nothing else, in a new virtual environment or the present one."""
    check_space(extra, root, Path(tempfile.gettempdir()))
    print(f"Setting up .venv for {extra}: some minutes, once. Log: {venv / 'setup.log'}", flush=True)
    if hint and extra == "cpu" and Path("/proc/driver/nvidia/version").exists():
        print("  (an NVIDIA GPU is here: `make setup EXTRA=cuda` sets up for it instead)", flush=True)
    if anew:
        make_venv(venv)
    for name in ("setup.json", "setup.log"):
        (venv / name).unlink(missing_ok=True)
    locks = lock_files(root, extra)
    install_locked(venv, locks)
    remove_others(venv, locks)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/setup", description=__doc__.partition("\n")[0])
    parser.add_argument("--extra", choices=sorted(VENV_GIB), help="vLLM's build (default: as before, cpu at first)")
    options = parser.parse_args()
    try:
        with one_at_a_time(ROOT):
            set_up(ROOT, options.extra, keep_python=not os.environ.get("PYTHON"))
    except PipError as error:
        print("\n".join(f"  | {line}" for line in error.tail), file=sys.stderr)
        print(f"error: {error}", file=sys.stderr)
        return 1
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or ROOT}: {error.strerror}; mend that and run again", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nerror: interrupted; run again to finish the set-up", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
