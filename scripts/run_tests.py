"""Lint and tests, as `make check`, `make test` and CI run them.

    python -m scripts.run_tests                        everything
    python -m scripts.run_tests lint unit              some of: lint, unit, integration, e2e
    python -m scripts.run_tests lint -- ARGUMENTS      pytest with these arguments instead of the suites
    python -m scripts.run_tests --repeat-failed ...    failed tests once more at the end, each alone
    python -m scripts.run_tests --record FILE ...      note what each test takes (scripts.test_times)

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
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec

from scripts.in_processes.sitecustomize import note
from scripts.outcomes import Outcomes, cpu_seconds

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
STEPS = ("lint", *SUITES)
SLOWEST = ("--durations=40", "--durations-min=4")
"""What pytest tells at the end of a suite: which tests took longest, to know what to make quicker."""
FORKING = {"integration"}
"""Suites whose servers are forks of a process that has imported vLLM (tests/imported.py), beside the first suite."""
IMPORTED = "DYN_IMPORTED"
MOST_REPEATED = 5
"""Failed tests of one run that are repeated. More are no accident."""
PASSED, FAILED, NO_TESTS = 0, 1, 5
"""Exit codes of pytest."""


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

    def add(self, outcomes: Outcomes) -> None:
        self.passed += len(outcomes.passed)
        self.skipped += len(outcomes.skipped)
        self.failed += outcomes.failed

    def repeat(self, passes: Callable[[str], bool]) -> None:
        """Run the failed tests once more, unless they are many."""
        if len(self.failed) > MOST_REPEATED:
            return
        self.flaky = [test for test in self.failed if passes(test)]
        self.failed = [test for test in self.failed if test not in self.flaky]
        self.passed += len(self.flaky)

    def lines(self) -> list[str]:
        flaky = [f"flaky: {test} (failed, then passed when it was repeated alone)" for test in self.flaky]
        failed = [f"failed: {name}" for name in (*self.broken, *self.failed)]
        return [*flaky, *failed, f"{self.passed} passed, {len(self.failed)} failed, {self.skipped} skipped"]

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
    with tempfile.TemporaryDirectory() as folder:
        socket = str(Path(folder, "imported.sock"))
        command = [sys.executable, "-m", "tests.imported", socket, "components.vllm.preload"]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        os.environ[IMPORTED] = socket
        try:
            yield
        finally:
            del os.environ[IMPORTED]
            process.kill()
            process.wait()


def run_pytest(arguments: Sequence[str]) -> tuple[int, Outcomes]:
    """Run pytest, its output shown as it comes; returns its exit code and what it has noted."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "outcomes")
        command = [sys.executable, "-m", "pytest", "-p", "scripts.outcomes", f"--outcomes={file}", *arguments]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)
        try:
            code = process.wait()
        except SystemExit:
            process.send_signal(signal.SIGINT)
            raise
        finally:
            # Interrupted, it ends its servers first.
            process.wait()
        return code, msgspec.json.decode(file.read_bytes(), type=Outcomes) if file.exists() else Outcomes()


def record(path: Path) -> None:
    """Have this process and all that it starts note what they do in a new file."""
    path.unlink(missing_ok=True)
    os.environ["DYN_RECORD"] = str(path.resolve())
    ours = str(ROOT / "scripts" / "in_processes")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (ours, os.environ.get("PYTHONPATH"))))


def run_suite(report: Report, name: str, arguments: Sequence[str]) -> None:
    say(f"\n{name}: pytest {' '.join(arguments)}")
    began, cpu = time.monotonic(), cpu_seconds(os.getpid())
    code, outcomes = run_pytest((*SLOWEST, *arguments))
    note("suite", name=name, seconds=time.monotonic() - began, cpu=cpu_seconds(os.getpid()) - cpu)
    report.add(outcomes)
    if code not in (PASSED, FAILED) or (code == FAILED and not outcomes.failed):
        report.broken.append(f"{name}, as {'no test was found' if code == NO_TESTS else f'pytest ended with {code}'}")
    say(f"{name}: {time.monotonic() - began:.0f} s")


def passes_alone(test: str) -> bool:
    say(f"\nonce more, alone: {test}")
    code, _ = run_pytest([test])
    return code == PASSED


def run_all(checks: Sequence[str], suites: Sequence[tuple[str, Sequence[str]]]) -> Report:
    """Lint runs beside the first suite alone: what follows has tests that others' work disturbs."""
    report = Report()
    with ThreadPoolExecutor(len(LINT)) as pool:
        passed = {name: pool.submit(lint, name) for name in checks}
        for name, arguments in suites[:1]:
            run_suite(report, name, arguments)
    report.broken += [name for name, check in passed.items() if not check.result()]
    for name, arguments in suites[1:]:
        run_suite(report, name, arguments)
    return report


def stop(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def main(arguments: Sequence[str]) -> int:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat-failed", action="store_true", help="run failed tests once more, each alone")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="note what tests take in a file, a JSON object a line"
    )
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(STEPS)} (default: all)")
    options = parser.parse_args(arguments[:at])
    steps = options.steps or STEPS
    if unknown := set(steps) - set(STEPS):
        parser.error(f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    own = [("pytest", arguments[at + 1 :])] if at < len(arguments) else []
    suites = own or [(name, SUITES[name]) for name in SUITES if name in steps]
    signal.signal(signal.SIGTERM, stop)
    if options.record is not None:
        record(options.record)
    with imported(not FORKING.isdisjoint(name for name, _ in suites)):
        report = run_all([*LINT] if "lint" in steps else [], suites)
    if options.repeat_failed:
        report.repeat(passes_alone)
    say("\n" + "\n".join(report.lines()))
    return report.exit_code


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
