"""Lint and tests, as `make check`, `make test` and CI run them.

    python -m scripts.run_tests                        lint, unit, integration and e2e, without nightly tests
    python -m scripts.run_tests lint unit              some of them; or nightly, or a lane of scripts.lanes
    python -m scripts.run_tests lint -- ARGUMENTS      pytest with these arguments instead of the suites
    python -m scripts.run_tests --changed git ...      of the unit tests, those that a change touches
    python -m scripts.run_tests --turn ...             also a slice of the nightly tests, and touched lanes
    python -m scripts.run_tests --repeat-failed ...    failed tests once more at the end, each alone
    python -m scripts.run_tests --record FILE ...      note what each test takes (scripts.timings)

Lint runs beside the first suite. All that was asked for is run, whatever fails. The last line is
`N passed, N failed, N skipped`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec

from scripts import changes, lanes
from scripts.in_processes.sitecustomize import note
from scripts.outcomes import Outcomes, cpu_seconds
from tests.imported import importing

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
LINT: dict[str, tuple[str, ...]] = {
    "ruff check": ("ruff", "check", "."),
    "ruff format": ("ruff", "format", "--check", "."),
    "mypy": ("mypy",),
    "lint-imports": ("lint-imports",),
    "reference": ("python", "-m", "scripts.reference", "--check"),
}
CORES = len(os.sched_getaffinity(0))
SUITES: dict[str, tuple[str, ...]] = {
    "unit": ("tests/unit", f"--numprocesses={min(CORES, 8)}"),
    # They wait more than they compute. Stolen from the end of a queue, tests of one module stay together mostly, and
    # share its server.
    "integration": ("tests/integration", f"--numprocesses={min(CORES + 2, 6)}", "--dist=worksteal"),
    "e2e": ("tests/e2e", "-m", "not families"),
}
"""Name -> arguments of pytest. Every folder with tests belongs to one of them."""
STEPS = ("lint", *SUITES, "nightly", *lanes.LANES)
EVERYDAY = ("lint", *SUITES)
SLOWEST = ("--durations=40", "--durations-min=4")
"""What pytest tells at the end of a suite: which tests took longest, to know what to make quicker."""
SIDES = {"e2e": 2}
"""Suites that run as several processes side by side, each with servers of its own: one server after the other leaves a
core idle."""
FORKING = {"integration", "e2e"}
"""Suites whose servers are forks of a process that has imported vLLM (tests/imported.py), beside the first suite."""
IMPORTED = "DYN_IMPORTED"
MOST_REPEATED = 5
"""Failed tests of one run that are repeated. More are no accident."""
PASSED, FAILED, NO_TESTS = 0, 1, 5
"""Exit codes of pytest."""


@dataclass(frozen=True)
class Run:
    """A run of pytest, or of a module if `suite` is None. `blocks`: whether the whole fails if it does. `sides`: number
    of processes of pytest that share its tests."""

    name: str
    suite: str | None
    arguments: tuple[str, ...]
    blocks: bool = True
    sides: int = 1


@dataclass
class Report:
    """What the run has come to."""

    passed: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)
    """Tests."""
    flaky: list[str] = field(default_factory=list)
    """Tests that failed, and passed when they were repeated."""
    broken: list[str] = field(default_factory=list)
    """What failed beside tests: lint, and runs of pytest that did not get to their end."""
    not_blocking: list[str] = field(default_factory=list)
    """What failed of the slice, which is no reason to fail."""

    def add(self, outcomes: Outcomes, blocks: bool = True) -> None:
        self.passed += len(outcomes.passed)
        self.skipped += len(outcomes.skipped)
        (self.failed if blocks else self.not_blocking).extend(outcomes.failed)

    def add_broken(self, name: str, blocks: bool) -> None:
        (self.broken if blocks else self.not_blocking).append(name)

    def repeat(self, passes: Callable[[str], bool]) -> None:
        """Run the failed tests once more, unless they are many; those of the slice apart from the others."""
        for failed in (self.failed, self.not_blocking):
            if len(failed) <= MOST_REPEATED:
                flaky = [test for test in failed if ".py" in test and passes(test)]
                failed[:] = [test for test in failed if test not in flaky]
                self.flaky += flaky
                self.passed += len(flaky)

    def lines(self) -> list[str]:
        flaky = [f"flaky: {test} (failed, then passed when it was repeated alone)" for test in self.flaky]
        failed = [f"failed: {name}" for name in (*self.broken, *self.failed)]
        others = [f"not blocking: failed: {name}" for name in self.not_blocking]
        return [*flaky, *others, *failed, f"{self.passed} passed, {len(self.failed)} failed, {self.skipped} skipped"]

    @property
    def exit_code(self) -> int:
        return int(bool(self.failed or self.broken))


def say(text: str) -> None:
    print(text, flush=True)


def lint(name: str) -> bool:
    """Run a check; its output is shown if it fails."""
    program, *arguments = LINT[name]
    began = time.monotonic()
    done = subprocess.run(
        [str(BIN / program), *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    passed = done.returncode == 0
    say(f"\n{name}: {'passed' if passed else 'failed'} in {time.monotonic() - began:.0f} s")
    if not passed:
        say(done.stdout)
    return passed


@contextmanager
def imported(wanted: bool) -> Iterator[None]:
    """Have a process that imports vLLM, from which servers of tests are forked, and name it in the environment."""
    if not wanted:
        yield
        return
    with importing(os.environ) as socket:
        os.environ[IMPORTED] = str(socket)
        try:
            yield
        finally:
            del os.environ[IMPORTED]


def run_pytest(arguments: Sequence[str]) -> tuple[int, Outcomes]:
    """Run pytest, its output shown as it comes; returns its exit code and what it has noted."""
    return run_sides(arguments, 1)[0]


def run_sides(arguments: Sequence[str], sides: int) -> list[tuple[int, Outcomes]]:
    """Run pytest as a number of processes side by side, which share the tests. The output of the first is shown as it
    comes, that of the others behind it. Returns the exit code of each, and what it has noted."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as open_files:
        files = [Path(folder, f"outcomes.{side}") for side in range(sides)]
        outputs = [open_files.enter_context(Path(f"{file}.out").open("w+b")) for file in files[1:]]
        processes = []
        for side, (file, output) in enumerate(zip(files, (None, *outputs), strict=True)):
            command = [sys.executable, "-m", "pytest", "-p", "scripts.outcomes", f"--outcomes={file}", *arguments]
            shared = [f"--side={side + 1}/{sides}"] if sides > 1 else []
            processes.append(
                subprocess.Popen([*command, *shared], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            )
        try:
            codes = [process.wait() for process in processes]
        except SystemExit:
            for process in processes:
                process.send_signal(signal.SIGINT)
            raise
        finally:
            # Interrupted, they end their servers first.
            for process in processes:
                process.wait()
        for output in outputs:
            output.seek(0)
            say(output.read().decode(errors="replace"))
        noted = [
            msgspec.json.decode(file.read_bytes(), type=Outcomes) if file.exists() else Outcomes() for file in files
        ]
        return list(zip(codes, noted, strict=True))


def keep_compiled_modules() -> None:
    """Have modules compiled once. Where the environment forbids to keep them, each process of a server compiles ours
    again, for a second of a core."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def record(path: Path) -> None:
    """Have this process and all that it starts note what they do in a new file."""
    path.unlink(missing_ok=True)
    os.environ["DYN_RECORD"] = str(path.resolve())
    ours = str(ROOT / "scripts" / "in_processes")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (ours, os.environ.get("PYTHONPATH"))))


def run_suite(report: Report, run: Run) -> None:
    command = "pytest" if run.suite is not None else f"python -m {run.arguments[0]}"
    say(f"\n{run.name}: {command} {' '.join(run.arguments[run.suite is None :])}")
    began, cpu = time.monotonic(), cpu_seconds(os.getpid())
    if run.suite is None:
        code = subprocess.run([sys.executable, "-m", *run.arguments], cwd=ROOT, stdin=subprocess.DEVNULL).returncode
        if code != 0:
            report.add_broken(f"{run.name}, which ended with {code}", run.blocks)
    else:
        for code, outcomes in run_sides((*SLOWEST, *run.arguments), run.sides):
            report.add(outcomes, run.blocks)
            is_empty_part = code == NO_TESTS and any(argument.startswith("--part=") for argument in run.arguments)
            if not is_empty_part and (code not in (PASSED, FAILED) or (code == FAILED and not outcomes.failed)):
                why = "no test was found" if code == NO_TESTS else f"pytest ended with {code}"
                report.add_broken(f"{run.name}, as {why}", run.blocks)
    note("suite", name=run.name, seconds=time.monotonic() - began, cpu=cpu_seconds(os.getpid()) - cpu)
    say(f"{run.name}: {time.monotonic() - began:.0f} s")


def passes_alone(test: str) -> bool:
    say(f"\nonce more, alone: {test}")
    code, _ = run_pytest([test])
    return code == PASSED


def run_all(checks: Sequence[str], runs: Sequence[Run]) -> Report:
    """Lint runs beside the first suite alone: what follows has tests that others' work disturbs."""
    report = Report()
    with ThreadPoolExecutor(len(LINT)) as pool:
        passed = {name: pool.submit(lint, name) for name in checks}
        for run in runs[:1]:
            run_suite(report, run)
    report.broken += [name for name, check in passed.items() if not check.result()]
    for run in runs[1:]:
        run_suite(report, run)
    return report


def nightly_runs(items: Sequence[lanes.Item], *, blocks: bool = True) -> list[Run]:
    """Runs of nightly tests, those of a suite with its options."""
    found = []
    for name, group in lanes.runs(items):
        suite = group[0].suite
        options = SUITES[suite][1:] if suite is not None else ()
        arguments = [argument for item in group for argument in item.arguments]
        # Of two `-m`, pytest goes by the last.
        found.append(Run(name if group[0].alone else f"nightly {name}", suite, (*options, *arguments), blocks))
    return found


def suite_run(suite: str, changed: frozenset[str] | None) -> Run:
    """The everyday tests of a suite; of unit tests, those that a change touches. None: anything may have changed."""
    folder, *options = SUITES[suite]
    tests = None
    if suite == "unit" and changed is not None:
        tests = changes.affected_tests(changed, changes.read_modules(ROOT))
        say(f"unit tests that the change touches: {'all' if tests is None else f'{len(tests)} files'}")
    if tests is None or changed is None:
        return Run(suite, suite, (folder, *options, *lanes.everyday(suite)), sides=SIDES.get(suite, 1))
    touched = {item.arguments[0] for item in lanes.items(ROOT, {}) if item.touched_by(changed)}
    return Run(suite, suite, (*(test for test in tests if lanes.runs_every_day(test) or test in touched), *options))


def own_run(arguments: Sequence[str]) -> Run:
    """A run of pytest with the arguments of whoever asks, with what the suites of its tests need."""
    named = (suite for suite in FORKING if any(argument.startswith(f"tests/{suite}") for argument in arguments))
    return Run("pytest", next(named, "pytest"), tuple(arguments))


def named_changes(changed: str) -> frozenset[str] | None:
    """Paths: those given, or for `git` those that differ from the remote's main branch. None: any."""
    if changed not in {"all", "git"}:
        return frozenset(changed.split())
    try:
        return None if changed == "all" else changes.changed_since(ROOT, changes.branch_base(ROOT))
    except changes.UnknownChangeError as error:
        say(f"what has changed is unknown: {error}")
        return None


def turn_of_ci() -> lanes.Turn:
    """The slice and the touched lanes of this commit. $SLICE: another slice. $BASE: the commit that the change began
    from, instead of the newest that is six hours older."""
    try:
        changed = changes.changed_since(ROOT, os.environ.get("BASE") or changes.recent_base(ROOT))
    except changes.UnknownChangeError as error:
        say(f"what has changed is unknown, so the tests of all lanes with paths are run: {error}")
        changed = None
    number = slice_asked_for()
    try:
        number = changes.turn_of(ROOT) if number is None else number
    except changes.UnknownChangeError:
        number = 0
    return lanes.turn(lanes.items(ROOT, lanes.read_seconds()), number, changed)


def slice_asked_for() -> int | None:
    """The number, from 0, of the slice that $SLICE names from 1, or None."""
    return int(os.environ["SLICE"]) - 1 if os.environ.get("SLICE") else None


def stop(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat-failed", action="store_true", help="run failed tests once more, each alone")
    parser.add_argument("--record", type=Path, metavar="FILE", help="note there what each test takes")
    parser.add_argument("--changed", default="all", metavar="PATHS", help="what has changed: all, git, or paths")
    parser.add_argument("--turn", action="store_true", help="also a slice of nightly tests, and touched lanes")
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(STEPS)} (default: the first four)")
    options = parser.parse_args(arguments)
    options.steps = options.steps or EVERYDAY
    if unknown := set(options.steps) - set(STEPS):
        parser.error(f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    return options


def chosen_runs(options: argparse.Namespace, turn: lanes.Turn | None) -> list[Run]:
    """What was asked for, in the order in which it runs."""
    changed = named_changes(options.changed)
    runs = [suite_run(suite, changed) for suite in SUITES if suite in options.steps]
    items = lanes.items(ROOT, lanes.read_seconds())
    if "nightly" in options.steps:
        number = slice_asked_for()
        runs += nightly_runs(items if number is None else lanes.turn(items, number, ()).extra)
    runs += nightly_runs([item for item in items if item.lane in options.steps])
    if turn is not None:
        runs += [*nightly_runs(turn.touched), *nightly_runs(turn.extra, blocks=False)]
    return runs


def main(arguments: Sequence[str]) -> int:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options = parse(arguments[:at])
    turn = turn_of_ci() if options.turn else None
    own = [own_run(arguments[at + 1 :])] if at < len(arguments) else []
    runs = own or chosen_runs(options, turn)
    for line in turn.lines() if turn is not None else []:
        say(line)
    signal.signal(signal.SIGTERM, stop)
    keep_compiled_modules()
    if options.record is not None:
        record(options.record)
    with imported(any(run.suite in FORKING for run in runs)):
        report = run_all([*LINT] if "lint" in options.steps else [], runs)
    if options.repeat_failed:
        report.repeat(passes_alone)
    say("\n" + "\n".join([*(turn.lines() if turn is not None else []), *report.lines()]))
    return report.exit_code


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
