"""An environment of its own for each client, in a cache folder: made once, found again by what it is made of."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version
from pathlib import Path

from dynamo_local.core.errors import DynamoError
from tests.clients.recipes import AS_OF, NodePackages, OwnEnvironment, PythonPackages
from tests.programs import run

INSTALL_WITHIN_S = 900.0
_FINISHED = "finished"


class InstallError(DynamoError):
    """An environment cannot be made."""


@dataclass(frozen=True)
class Environment:
    """`version` is the client's. `programs`: the folder of its commands. `modules`: Node's packages."""

    version: str
    programs: Path
    modules: Path | None = None


def make(name: str, recipe: PythonPackages | NodePackages | OwnEnvironment, cache: Path) -> Environment:
    """The environment, made if it is not there. Raises InstallError."""
    if isinstance(recipe, OwnEnvironment):
        distribution = packages_distributions()[recipe.package][0]
        return Environment(version(distribution), Path(sys.executable).parent)
    folder = cache / f"{name}-{_digest(recipe)}"
    if not (folder / _FINISHED).exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if isinstance(recipe, PythonPackages):
            _install_python(recipe, folder, cache)
        else:
            _install_node(recipe, folder)
        (folder / _FINISHED).touch()
    if isinstance(recipe, PythonPackages):
        return Environment(recipe.requirements[0].partition("==")[2], folder / "bin")
    return Environment(recipe.packages[0].rpartition("@")[2], folder, folder / "node_modules")


def _digest(recipe: PythonPackages | NodePackages) -> str:
    return hashlib.sha256(f"{recipe} {AS_OF} {sys.version_info[:2]}".encode()).hexdigest()[:12]


def _install_python(recipe: PythonPackages, folder: Path, cache: Path) -> None:
    uv = Path(sys.executable).with_name("uv")
    _run([uv, "venv", "--quiet", "--clear", f"--python={sys.executable}", folder])
    excluded = folder / "borrowed.txt"
    excluded.write_text("\n".join(recipe.borrowed))
    options = [f"--python={folder}", f"--exclude-newer={AS_OF}", f"--excludes={excluded}"]
    _run([uv, "pip", "install", "--quiet", *options, *recipe.requirements], {"UV_CACHE_DIR": str(cache / "uv-cache")})
    if recipe.borrowed:
        (packages,) = folder.glob("lib/python*/site-packages")
        # Read last, so that what the environment has itself comes first.
        (packages / "zz_borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")


def _install_node(recipe: NodePackages, folder: Path) -> None:
    if shutil.which("npm") is None:
        raise InstallError("npm is not installed", "on Debian and Ubuntu: apt install npm")
    pins = dict(package.rsplit("@", 1) for package in recipe.packages)
    (folder / "package.json").write_text(json.dumps({"private": True, "dependencies": pins}))
    _run(["npm", "install", "--silent", "--no-audit", "--no-fund", f"--before={AS_OF}", f"--prefix={folder}"])


def _run(command: Sequence[str | Path], environ: Mapping[str, str] | None = None) -> None:
    ended = run(command, INSTALL_WITHIN_S, environ)
    if ended.code != 0:
        raise InstallError(f"{command[0]} ended with {ended.code}", f"it said:\n{ended.last_lines}")
