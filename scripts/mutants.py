"""Changes that tests should notice: each is made in a copy of the project, and the tests that run its line are run.

    python -m scripts.mutants watch --seed 1 tests     make no change, and note which tests run the lines (adds up)
    python -m scripts.mutants run --seed 1             make the changes, and print which were noticed

A change turns a condition round, adds one to a number or turns a boolean round, or deletes a call whose result is not
used. Each is tried for three minutes at most, until the first test fails: those that run every day first, then, if none
of them has noticed, the nightly ones for as long. Lines that run while a module is imported are no single test's:
there, tests that import the module are run, nearest first.

Processes that tests start note their lines as well, for the test that runs at that moment.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from scripts import changes, lanes
from scripts.in_processes.probes import PROBES
from scripts.outcomes import Outcomes
from scripts.timings import file_of

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "mutants"
"""Has a file for each seed: numbers of changes, and tests that run their lines."""
PRODUCT = ("components", "dynamo_local", "state")
WITHIN_S = 180.0
EVERYDAY, NIGHTLY = "caught", "caught by a nightly test alone"
"""Verdicts: the tests that have noticed a change."""
SUITES = ("tests/unit", "tests/integration", "tests/e2e")
"""In the order in which they are run."""
HIT = "__import__('scripts.in_processes.probes').in_processes.probes.hit"
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


def probed(source: bytes, drawn: Mapping[int, Change]) -> bytes:
    """Return a module in which each of its changes, by their numbers, is not made, and noted when it is run."""
    grown: list[tuple[Change, int]] = []
    # From the end, so that places stay; of those within each other, the inner one first.
    for number, change in sorted(drawn.items(), key=lambda each: (-each[1].start, each[1].end)):
        end = change.end + sum(more for inner, more in grown if inner.end <= change.end)
        old, hit = source[change.start : end].decode(), f"{HIT}({number})"
        text = f"{hit}; {old}" if change.kind == "call" else f"({hit} or ({old}))"
        grown.append((change, len(text.encode()) - (end - change.start)))
        source = source[: change.start] + text.encode() + source[end:]
    return source


def seen(path: Path) -> dict[int, set[str]]:
    """Tests that have run the lines of changes, by number, as `watch` has noted them."""
    found: dict[int, set[str]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        number, _, test = line.partition(" ")
        found.setdefault(int(number), set()).add(test)
    return found


def chosen(change: Change, tests: Iterable[str], texts: Mapping[str, str]) -> list[str]:
    """Tests to run for a change, in their order. `tests`: those that were seen to run it."""
    found = sorted(tests)
    if not found and _runs_at_import(change, texts[change.path]):
        found = [path for path in changes.dependents([change.path], texts) if path.startswith(SUITES)]
        found = [path for path in found if Path(path).name.startswith("test_")]
    return found


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
        self.notes = Path(self._temporary.name, "notes")
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


def watch(drawn: Sequence[Change], notes: Path, arguments: Sequence[str]) -> int:
    """Run tests in a copy with probes, and add to the notes which of them run the lines. Returns pytest's exit code."""
    notes.parent.mkdir(parents=True, exist_ok=True)
    with Copy() as copy:
        for path in {change.path for change in drawn}:
            here = {number: change for number, change in enumerate(drawn) if change.path == path}
            copy.write(path, probed((ROOT / path).read_bytes(), here))
        command = [sys.executable, "-m", "pytest", "-p", "scripts.outcomes", *arguments]
        # Without tests/imported.py, whose forks could not tell which test they are for.
        environ = {**os.environ, "PYTHONPATH": str(copy.root), PROBES: str(copy.notes)}
        code = subprocess.run(command, cwd=copy.root, env=environ, check=False).returncode
        with notes.open("a") as file:
            file.write(copy.notes.read_text() if copy.notes.exists() else "")
    return code


def run(drawn: Sequence[Change], notes: Path, options: argparse.Namespace) -> int:
    tests, texts = seen(notes), changes.read_modules(ROOT)
    verdicts = []
    print("| change | verdict | tests | seconds | by |\n|---|---|---|---|---|")
    with Copy() as copy:
        for number, change in enumerate(drawn):
            verdict = judge(copy, change, chosen(change, tests.get(number, ()), texts))
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
    commands.add_parser("watch", help="note which tests run which lines; other arguments are pytest's")
    runs = commands.add_parser("run", help="make changes, and see which are noticed")
    runs.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts there, too")
    for command in commands.choices.values():
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--number", type=int, default=20)
        command.add_argument("--under", action="append", metavar="FOLDER", help="change only what is there; repeatable")
    options, rest = parser.parse_known_args(arguments)
    every = all_changes(changes.read_modules(ROOT), options.under or PRODUCT)
    drawn, notes = draw(every, options.number, options.seed), FOLDER / f"seed{options.seed}.txt"
    if options.command == "watch":
        return watch(drawn, notes, rest)
    if rest:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    return run(drawn, notes, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
