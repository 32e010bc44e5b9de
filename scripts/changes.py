"""What a change touches: the paths that differ, by git, and the modules that depend on them, by imports."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

PACKAGES = ("benchmarks", "components", "dynamo_local", "examples", "scripts", "state", "tests")
RECENT_S = 6 * 3600
"""Commits within this time of HEAD count as the change where nobody names its base."""

_IMPORT = re.compile(r"^\s*(?:from\s+([\w.]+)\s+import\s+(\([^)]*\)|[^#\n]*)|import\s+([\w.]+))", re.MULTILINE)
_NAMED = re.compile(rf"[\"']((?:{'|'.join(PACKAGES)})(?:\.\w+)+)[\"':]")
"""A module in a string: of a command, of a graph, of what is imported late."""


class UnknownChangeError(Exception):
    """Git cannot say what has changed."""


def git(root: Path, *arguments: str) -> str:
    """What a git command prints. Raises UnknownChangeError if there is no git, no repository, or no such commit."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UnknownChangeError(str(error)) from error
    return done.stdout.strip()


def branch_base(root: Path) -> str:
    """The commit from which this branch began: what it has in common with the remote's main branch."""
    return git(root, "merge-base", "HEAD", "origin/HEAD")


def recent_base(root: Path) -> str:
    """The newest commit of the main line that is six hours older than HEAD. Raises UnknownChangeError without one."""
    head_s = int(git(root, "show", "--no-patch", "--format=%ct", "HEAD"))
    found = git(root, "rev-list", "--first-parent", "-1", f"--before={head_s - RECENT_S}", "HEAD")
    if not found:
        raise UnknownChangeError("the history does not go back six hours")
    return found


def changed_since(root: Path, base: str) -> frozenset[str]:
    """Paths that differ between a commit and the working tree, files that git does not know included."""
    known = git(root, "diff", "--name-only", "--no-renames", base)
    new = git(root, "ls-files", "--others", "--exclude-standard")
    return frozenset([*known.splitlines(), *new.splitlines()])


def turn_of(root: Path) -> int:
    """A number that is another one for the next commit: how many there are, or one drawn by its name where git has not
    all of them."""
    if git(root, "rev-parse", "--is-shallow-repository") == "true":
        return int(git(root, "rev-parse", "HEAD")[:8], 16)
    return int(git(root, "rev-list", "--count", "HEAD"))


def module_of(path: str) -> str:
    """The name of the module in a file, as `a.b` for `a/b/__init__.py`."""
    return ".".join(PurePosixPath(path).with_suffix("").parts).removesuffix(".__init__")


def imported_by(text: str) -> Iterator[str]:
    """Names that a module's text imports, or has in a string. Some are of no module but of what is in one."""
    for package, names, module in _IMPORT.findall(text):
        yield package or module
        for name in re.findall(r"\w+", names):
            yield f"{package}.{name}"
    yield from _NAMED.findall(text)


def importers(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """Path -> paths of the modules that import it, itself or a module below it; of all given texts by path. What a
    conftest.py imports is imported by all tests below it."""
    paths = {module_of(path): path for path in texts}
    found: dict[str, set[str]] = defaultdict(set)
    for path, text in texts.items():
        for name in imported_by(text):
            while name:
                if name in paths:
                    found[paths[name]].add(path)
                name = name.rpartition(".")[0]
    for conftest in texts:
        if PurePosixPath(conftest).name == "conftest.py":
            below = str(PurePosixPath(conftest).parent) + "/"
            found[conftest] |= {path for path in texts if path.startswith(below) and path != conftest}
    return found


def dependents(changed: Iterable[str], texts: Mapping[str, str]) -> list[str]:
    """Paths of modules that a change of others may change, the changed ones included, nearest first."""
    by = importers(texts)
    reached = dict.fromkeys(sorted(changed))
    todo = list(reached)
    for path in todo:
        for one in sorted(by.get(path, ())):
            if one not in reached:
                reached[one] = None
                todo.append(one)
    return todo


def read_modules(root: Path) -> dict[str, str]:
    """The text of each module, by path."""
    files = (file for package in PACKAGES for file in (root / package).rglob("*.py"))
    return {file.relative_to(root).as_posix(): file.read_text() for file in files}


ANYTHING = ("tests/conftest.py",)
"""What all tests depend on, without an import."""
ALWAYS = ("tests/unit/docs", "tests/unit/test_")
"""Prefixes of tests that read the whole tree."""


def affected_tests(changed: Iterable[str], texts: Mapping[str, str]) -> list[str] | None:
    """Files of unit tests that a change may make fail. None: any, as it is not of modules and pages alone."""
    modules = {path for path in changed if path.endswith(".py")}
    if not modules.isdisjoint(ANYTHING) or any(not path.endswith((".py", ".md")) for path in changed):
        return None
    reached = {*dependents(modules, texts), *(path for path in texts if path.startswith(ALWAYS))}
    tests = (path for path in sorted(reached) if path in texts and path.startswith("tests/unit/"))
    return [path for path in tests if PurePosixPath(path).name.startswith("test_")]
