"""Run vLLM's own API tests against this project's servers, and compare with what is expected of each.

Ends with 1 if a test that should pass fails, or one that is listed as failing passes: then the list is to be changed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from dynamo_local.core.errors import DynamoError
from dynamo_local.model.cache import default_cache_root
from tests.clients.model import steady_model
from tests.conformance import expectations, suite
from tests.conformance.expectations import Expectation, Side, Verdict
from tests.conformance.sdist import fetch_tests
from tests.conformance.servers import GRAPHS, VLLM, serving

LIST = Path(__file__).with_name("expected.txt")
RUN_WITHIN_S = 1800.0
MAX_NEW_TOKENS = 64
"""Default of `max_tokens`, since the model seldom ends by itself."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test."""

    passed: bool
    why: str


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    try:
        vllm_tests = fetch_tests(options.cache / "conformance")
    except DynamoError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    good = [_run(name, vllm_tests, options) for name in options.server or [*GRAPHS]]
    return 0 if all(good) else 1


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--server", action="append", choices=(*GRAPHS, VLLM), help="may be repeated (default: graphs)")
    parser.add_argument("--only", default="", metavar="EXPRESSION", help="tests whose names match, as for pytest -k")
    parser.add_argument("--passing", action="store_true", help="only tests that are expected to pass here")
    parser.add_argument("--update", action="store_true", help="write what came out to the list of what is expected")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep each server's results, one line a test")
    parser.add_argument("--cache", type=Path, default=default_cache_root(), help="for vLLM's tests")
    options = parser.parse_args(arguments)
    if options.update and (options.only or options.passing):
        parser.error("--update needs all tests")
    return options


def _run(name: str, vllm_tests: Path, options: argparse.Namespace) -> bool:
    """Run the tests against one server; returns whether all came out as expected."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        outcomes = _outcomes(name, vllm_tests, Path(folder), options)
    side = side_of(name)
    passed = {test: outcome.passed for test, outcome in outcomes.items()}
    expected = expectations.parse(LIST.read_text())
    if options.update:
        expected = expectations.update(expected, passed, side)
        LIST.write_text(expectations.render(expected))
    if options.passing:
        expected = expectations.passing(expected, side)
    verdict = expectations.judge(expected, passed, side, whole=not options.only)
    print(f"\n{name}: {len(passed)} tests in {time.monotonic() - began:.0f} s, {sum(passed.values())} passed")
    if side == "here":
        print(", ".join(f"{kind}: {count}" for kind, count in expectations.counts(expected, passed).items()))
    print("\n".join(_complaints(verdict, outcomes, expected)), flush=True)
    return verdict.as_expected


def _outcomes(name: str, vllm_tests: Path, folder: Path, options: argparse.Namespace) -> dict[str, Outcome]:
    files = suite.prepare(vllm_tests, folder / "suite")
    results = folder / f"{name}.jsonl"
    results.touch()
    with ExitStack() as stack:
        model = steady_model(folder / "model", max_new_tokens=MAX_NEW_TOKENS)
        url = stack.enter_context(serving(name, model, folder))
        selected = folder / "selected"
        wanted = expectations.passing(expectations.parse(LIST.read_text()), side_of(name))
        selected.write_text("\n".join(wanted))
        environ = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(folder / "suite"),
            suite.BASE_URL_ENV: url,
            suite.MODEL_ENV: str(model),
            suite.RESULTS_ENV: str(results),
            **({suite.SELECTED_ENV: str(selected)} if options.passing else {}),
        }
        pytest = [
            "-q",
            "--tb=no",
            "--no-header",
            "--no-summary",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:hypothesispytest",
            "-o",
            "asyncio_mode=strict",
        ]
        only = ["-k", options.only] if options.only else []
        subprocess.run(
            [sys.executable, "-m", "pytest", *pytest, *only, *files],
            cwd=folder / "suite",
            env=environ,
            stdin=subprocess.DEVNULL,
            timeout=RUN_WITHIN_S,
            check=False,
        )
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        shutil.copy(results, options.keep)
    lines = map(json.loads, results.read_text().splitlines())
    return {line["test"]: Outcome(line["outcome"] == "passed", line["why"]) for line in lines}


def side_of(server: str) -> Side:
    return "vllm" if server == VLLM else "here"


def _complaints(verdict: Verdict, outcomes: Mapping[str, Outcome], expected: Mapping[str, Expectation]) -> list[str]:
    return [
        *(f"FAILS, should pass: {test}\n{outcomes[test].why}\n" for test in verdict.newly_failing),
        *(f"PASSES, is listed as failing ({expected[test].reason}): {test}" for test in verdict.newly_passing),
        *(f"NOT LISTED: {test} ({'passes' if outcomes[test].passed else 'fails'})" for test in verdict.unlisted),
        *(f"DID NOT RUN: {test}" for test in verdict.not_run),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
