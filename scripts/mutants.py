"""Changes that tests should notice: each is made in a copy of the project, and the tests that run its line are run.

    python -m scripts.mutants map tests/unit tests/integration/bus     note which test runs which line (adds to the map)
    python -m scripts.mutants map --seed 1 tests                       only for the files that seed 1 changes: quicker
    python -m scripts.mutants run --seed 1                             make changes, and print which were noticed

A change turns a condition round, adds one to a number or turns a boolean round, or deletes a call whose result is not
used. Each is tried for three minutes at most, until the first test fails: those that run every day first, then, if none
of them has noticed, the nightly ones for as long. Lines that run while a module is imported are
no single test's: there, tests that import the module are run, nearest first.

Processes that tests start are in the map as well, forks included, by the test that was running when they started. They
serve other tests of its file, too, so all of the file is run. What SIGKILL ends is not in the map.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from scripts import changes, lanes
from scripts.outcomes import Outcomes
from scripts.timings import file_of

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "mutants"
MAP = FOLDER / "map.coverage"
PRODUCT = ("components", "dynamo_local", "state")
WITHIN_S = 180.0
EVERYDAY, NIGHTLY = "caught", "caught by a nightly test alone"
"""Verdicts: the tests that have noticed a change."""
PHASES = (" (setup)", " (call)", " (teardown)")
"""What $PYTEST_CURRENT_TEST has behind a node id."""
SUITES = ("tests/unit", "tests/integration", "tests/e2e")
"""In the order in which they are run."""
SETTINGS = """
[run]
parallel = true
data_file = {data}
context = ${{PYTEST_CURRENT_TEST-}}
patch = _exit, execv, fork
sigterm = true
disable_warnings = no-data-collected, module-not-imported, module-not-measured
include =
    {include}
"""
LOGS = frozenset({"debug", "info", "warning", "error", "exception", "log"})
"""Calls that tests need not notice when they are gone."""


@dataclass(frozen=True)
class Change:
    """A replacement of bytes `start` to `end` of a file, on lines `first` to `last` (from 1)."""

    path: str
    kind: str
    first: int
    last: int
    start: int
    end: int
    text: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]

    def shown(self, source: bytes) -> str:
        """What it does, on one line."""
        before = " ".join(source[self.start : self.end].decode().split())
        return f"{before[:60]} -> {' '.join(self.text.split())[:60]}"


class Verdict(msgspec.Struct):
    """What became of a change. `tests`: how many were to be run. `by`: the test that noticed it."""

    path: str
    line: int
    change: str
    verdict: str
    tests: int
    seconds: float
    by: str | None = None


def changes_of(path: str, source: bytes) -> Iterator[Change]:
    """All changes that can be made in a module."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def change(kind: str, node: ast.expr | ast.stmt, text: str) -> Change:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        old = source[start:end].decode()
        return Change(path, kind, node.lineno, node.end_lineno, start, end, text.format(old))

    for node in _mutable(ast.parse(source)):
        if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Constant):
            yield change("condition", node.test, "(not ({}))")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield change("constant", node, str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield change("constant", node, str(node.value + 1))
        elif isinstance(node, ast.Expr) and _is_call(node.value):
            yield change("call", node, "pass")


def _mutable(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes whose change changes what the program does: no annotations, nothing for type checkers or commands alone."""
    for name, value in ast.iter_fields(tree):
        if name in {"annotation", "returns"}:
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "__name__ == '__main__'"}:
                continue
            if isinstance(node, ast.AST):
                yield node
                yield from _mutable(node)


def _is_call(node: ast.expr) -> bool:
    call = node.value if isinstance(node, ast.Await) else node
    return isinstance(call, ast.Call) and not (isinstance(call.func, ast.Attribute) and call.func.attr in LOGS)


def draw(every: Sequence[Change], number: int, seed: int) -> list[Change]:
    """Some changes at random, each kind as often as the others while there are any."""
    drawn = random.Random(seed)
    kinds = {kind: [change for change in every if change.kind == kind] for kind in sorted({c.kind for c in every})}
    for of in kinds.values():
        drawn.shuffle(of)
    found: list[Change] = []
    while len(found) < number and any(kinds.values()):
        found += [of.pop() for of in kinds.values() if of]
    return found[:number]


class LineMap:
    """Which tests run which lines, as `map` has noted it."""

    def __init__(self, path: Path) -> None:
        from coverage import CoverageData

        self._data = CoverageData(str(path))
        self._data.read()

    def contexts(self, path: str, first: int, last: int) -> set[str]:
        """Of lines of a file, those numbered included: node ids, those of started processes followed by ` (call)`."""
        by_line = self._data.contexts_by_lineno(str(ROOT / path))
        # A test that runs pytest has the names of those tests behind its own.
        found = (context.partition("|")[0] for line in range(first, last + 1) for context in by_line.get(line, ()))
        return {context for context in found if context}


def to_run(contexts: set[str]) -> set[str]:
    """What to run: the tests themselves, and the files of those that have started processes."""
    started = {context for context in contexts if context.endswith(PHASES)}
    files = {file_of(context) for context in started}
    return files | {context for context in contexts - started if file_of(context) not in files}


def chosen(change: Change, lines: LineMap, texts: Mapping[str, str]) -> list[str]:
    """Tests to run for a change, in their order."""
    contexts = lines.contexts(change.path, change.first, change.last)
    if contexts:
        tests = sorted(to_run(contexts))
    elif _runs_at_import(change, texts[change.path]):
        tests = [path for path in changes.dependents([change.path], texts) if path.startswith(SUITES)]
        tests = [path for path in tests if Path(path).name.startswith("test_")]
    else:
        tests = []
    return tests


def everyday_and_nightly(tests: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments of pytest for those of some tests that run every day, and for the others."""
    everyday = [test for test in tests if lanes.runs_every_day(test)]
    apart = [target for target in lanes.NIGHTLY if "::" in target and file_of(target) in everyday]
    nightly = [*(test for test in tests if test not in everyday), *apart]
    return [*everyday, *(f"--deselect={target}" for target in apart)] if everyday else [], nightly


def _runs_at_import(change: Change, text: str) -> bool:
    """Whether it is in no function's body."""
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return not any(f.body[0].lineno <= change.first <= (f.end_lineno or 0) for f in functions)


class Copy:
    """A copy of the project's files in which changes are made. Use as a context manager."""

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="mutants-")
        self.root = Path(self._temporary.name, "project")
        self._clock = 1_000_000_000

    def __enter__(self) -> Copy:
        for name in changes.git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard").splitlines():
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.root / name)
        (self.root / ".venv").symlink_to(ROOT / ".venv")
        return self

    def __exit__(self, *_: object) -> None:
        self._temporary.cleanup()

    def write(self, path: str, text: bytes) -> None:
        """Write a module, at another time than ever before: Python goes by it for what it has compiled."""
        (self.root / path).write_bytes(text)
        self._clock += 1
        os.utime(self.root / path, (self._clock, self._clock))

    def first_failure(self, tests: Sequence[str], within_s: float) -> str | None:
        """Run tests until one fails, and return it; None if all pass. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + within_s
        options = [test for test in tests if test.startswith("-")]
        for suite in SUITES:
            some = [test for test in tests if test.startswith(f"{suite}/")]
            if some and (failed := self._run([*some, *options], max(1.0, deadline - time.monotonic()))):
                return failed
        return None

    def _run(self, tests: Sequence[str], within_s: float) -> str | None:
        names, results = (Path(self._temporary.name, name) for name in ("tests", "outcomes"))
        names.write_text("\n".join(tests))
        results.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "scripts.outcomes", f"--outcomes={results}"]
        process = subprocess.Popen(
            [*command, "-p", "no:cacheprovider", f"@{names}"],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": str(self.root)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = process.wait(within_s)
        finally:
            # Servers end with the process that has started them.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        outcomes = msgspec.json.decode(results.read_bytes(), type=Outcomes) if results.exists() else Outcomes()
        if outcomes.failed:
            return outcomes.failed[0]
        if code < 0:
            return f"pytest, which ended with {code}"
        if code != 0:
            raise RuntimeError(f"pytest ended with {code}; the tests were {tests}")
        return None


def judge(copy: Copy, change: Change, tests: Sequence[str]) -> Verdict:
    """Make a change, run tests, and undo it. A test that fails without the change as well has noticed nothing."""
    source = (ROOT / change.path).read_bytes()
    began = time.monotonic()
    by = None
    verdict = "survived" if tests else "no test"
    copy.write(change.path, change.apply(source))
    try:
        for noticed, some in zip((EVERYDAY, NIGHTLY), everyday_and_nightly(tests), strict=True):
            if some and (by := copy.first_failure(some, WITHIN_S)) is not None:
                verdict = noticed
                break
    except subprocess.TimeoutExpired:
        verdict = "out of time"
    copy.write(change.path, source)
    if by is not None and "::" in by and copy.first_failure([by], WITHIN_S) is not None:
        verdict = "test is broken"
    seconds = round(time.monotonic() - began, 1)
    return Verdict(change.path, change.first, change.shown(source), verdict, len(tests), seconds, by)


def all_changes(texts: Mapping[str, str], under: Sequence[str] = PRODUCT) -> list[Change]:
    product = sorted(path for path in texts if path.startswith(tuple(f"{each}/" for each in under)))
    return [change for path in product for change in changes_of(path, texts[path].encode())]


def make_map(arguments: Sequence[str], paths: Collection[str] = ()) -> int:
    """Run tests and add to the map which lines they run, of these modules or else of all. Returns pytest's code."""
    data = FOLDER / "data"
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    settings = FOLDER / "coveragerc"
    include = "\n    ".join(str(ROOT / path) for path in paths or [f"{package}/*" for package in PRODUCT])
    settings.write_text(SETTINGS.format(data=data / MAP.name, include=include))
    # Without tests/imported.py, whose forks could not tell which test they are for.
    command = [sys.executable, "-m", "pytest", "-p", "scripts.outcomes", *arguments]
    environ = {**os.environ, "COVERAGE_PROCESS_START": str(settings)}
    environ.pop("PYTEST_CURRENT_TEST", None)
    code = subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode
    combine = [sys.executable, "-m", "coverage", "combine", "--quiet", "--append", f"--data-file={MAP}", str(data)]
    subprocess.run(combine, cwd=ROOT, check=True)
    return code


def run(options: argparse.Namespace) -> int:
    lines = LineMap(MAP)
    texts = changes.read_modules(ROOT)
    every = all_changes(texts, options.under or PRODUCT)
    verdicts = []
    print("| change | verdict | tests | seconds | by |\n|---|---|---|---|---|")
    with Copy() as copy:
        for change in draw(every, options.number, options.seed):
            verdict = judge(copy, change, chosen(change, lines, texts))
            verdicts.append(verdict)
            place = f"{verdict.path}:{verdict.line} `{verdict.change.replace('|', '/')}`"
            row = (place, verdict.verdict, verdict.tests, verdict.seconds, verdict.by or "")
            print(f"| {' | '.join(map(str, row))} |", flush=True)
    caught, nightly = (sum(verdict.verdict == each for verdict in verdicts) for each in (EVERYDAY, NIGHTLY))
    print(f"\nseed {options.seed}: of {len(verdicts)}, {caught} caught every day, {nightly} more by nightly tests")
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(verdicts)))
    return 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    maps = commands.add_parser("map", help="note which tests run which lines; other arguments are pytest's")
    maps.add_argument("--seed", type=int, help="only of the files that `run` changes with this seed: much quicker")
    runs = commands.add_parser("run", help="make changes, and see which are noticed")
    runs.add_argument("--seed", type=int, default=0)
    runs.add_argument("--under", action="append", metavar="FOLDER", help="change only what is there; may be repeated")
    runs.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts there, too")
    for command in (maps, runs):
        command.add_argument("--number", type=int, default=20)
    options, rest = parser.parse_known_args(arguments)
    if options.command == "map":
        seeded = options.seed is not None
        drawn = draw(all_changes(changes.read_modules(ROOT)), options.number, options.seed) if seeded else []
        return make_map(rest, sorted({change.path for change in drawn}))
    if rest:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    return run(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
