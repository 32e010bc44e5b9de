"""Expectations of vLLM's tests, here and on vLLM's own server, and their comparison with a run. Pure.

The list of expectations is a text: a line for each test, below a heading with the expectation of the tests that follow.

    [passes]                    on both
    [fails: REASON]             on both
    [fails here: REASON]        passes on vLLM's own server
    [passes here: REASON]       fails on vLLM's own server
    [varies: REASON]            may pass or fail anywhere
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

UNEXPLAINED = "?"
"""Reason of tests that an update has added, to be replaced by a person."""

_HEADING = re.compile(r"\[([a-z ]+?)(?:: (.+))?\]")
_KINDS = {
    "passes": (True, True),
    "fails": (False, False),
    "fails here": (False, True),
    "passes here": (True, False),
    "varies": (None, None),
}

Side = Literal["here", "vllm"]


@dataclass(frozen=True)
class Expectation:
    """Expected results of a test, here and on vLLM's own server. None: the test may pass or fail."""

    here: bool | None
    vllm: bool | None
    reason: str = ""


@dataclass(frozen=True)
class Verdict:
    """The comparison of a run with the expectations: tests, sorted, by deviation."""

    newly_failing: tuple[str, ...]
    newly_passing: tuple[str, ...]
    unlisted: tuple[str, ...]
    not_run: tuple[str, ...]

    @property
    def as_expected(self) -> bool:
        return not (self.newly_failing or self.newly_passing or self.unlisted or self.not_run)


def parse(text: str) -> dict[str, Expectation]:
    """Parse a list into expectations by test. Raises ValueError for other text."""
    found: dict[str, Expectation] = {}
    current: Expectation | None = None
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            current = _heading(line, number)
        elif current is None or line in found:
            raise ValueError(f"line {number}: {'listed before' if current else 'no heading above'}: {line}")
        else:
            found[line] = current
    return found


def render(expected: Mapping[str, Expectation]) -> str:
    """The text that `parse` reads: headings in the order of their kinds, tests in alphabetical order."""
    order = {pair: kind for kind, pair in _KINDS.items()}
    kinds = list(order)

    def heading(test: str) -> tuple[int, str]:
        return kinds.index((expected[test].here, expected[test].vllm)), expected[test].reason

    parts = []
    for (kind, reason), tests in groupby(sorted(expected, key=lambda test: (*heading(test), test)), key=heading):
        name = order[kinds[kind]]
        parts.append("\n".join([f"[{name}: {reason}]" if reason else f"[{name}]", *tests]))
    return "\n\n".join(parts) + "\n"


def passing(expected: Mapping[str, Expectation], side: Side) -> dict[str, Expectation]:
    """Return the tests that are expected to pass on that side."""
    return {test: each for test, each in expected.items() if _side(each, side)}


def judge(
    expected: Mapping[str, Expectation], passed: Mapping[str, bool], side: Side, *, whole: bool = True
) -> Verdict:
    """Compare with what a run has come to (test -> whether it passed). `whole`: all tests were to run."""

    def wrong(*, fails: bool) -> Iterable[str]:
        return (test for test in sorted(passed) if test in expected and _side(expected[test], side) is fails)

    return Verdict(
        newly_failing=tuple(test for test in wrong(fails=True) if not passed[test]),
        newly_passing=tuple(test for test in wrong(fails=False) if passed[test]),
        unlisted=tuple(sorted(passed.keys() - expected.keys())),
        not_run=tuple(sorted(expected.keys() - passed.keys())) if whole else (),
    )


def update(expected: Mapping[str, Expectation], passed: Mapping[str, bool], side: Side) -> dict[str, Expectation]:
    """Return the expectations after a whole run. New ones have the reason UNEXPLAINED."""
    new = {}
    for test, good in passed.items():
        old = expected.get(test, Expectation(here=good, vllm=good, reason="" if good else UNEXPLAINED))
        new[test] = old if old.here is None else _with(old, side, good=good)
    return new


def counts(expected: Mapping[str, Expectation], passed: Mapping[str, bool]) -> dict[str, int]:
    """Count the tests that pass on both sides, or on one. `passed`: results here; those of vLLM's own server are taken
    from the list."""
    listed = {test: (good, expected[test].vllm) for test, good in passed.items() if test in expected}
    found = {
        "both": (True, True),
        "vLLM only": (False, True),
        "here only": (True, False),
        "neither": (False, False),
    }
    counted = {name: sum(pair == wanted for pair in listed.values()) for name, wanted in found.items()}
    return counted | {"varies": sum(vllm is None for _, vllm in listed.values())}


def _heading(line: str, number: int) -> Expectation:
    match = _HEADING.fullmatch(line)
    if match is None or match[1] not in _KINDS:
        raise ValueError(f"line {number}: no such heading: {line}")
    if (match[1] == "passes") is (match[2] is not None):
        raise ValueError(f"line {number}: a reason is for what does not pass on both, and all of it: {line}")
    here, vllm = _KINDS[match[1]]
    return Expectation(here, vllm, match[2] or "")


def _side(expectation: Expectation, side: Side) -> bool | None:
    return expectation.here if side == "here" else expectation.vllm


def _with(old: Expectation, side: Side, *, good: bool) -> Expectation:
    new = replace(old, here=good) if side == "here" else replace(old, vllm=good)
    if new == old:
        return old
    return replace(new, reason="" if new.here and new.vllm else UNEXPLAINED)
