"""The table of faults, from the trials of one run or of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.faults.kinds import FAULTS
from benchmarks.report import table
from benchmarks.spread import median

Trials = Mapping[str, Sequence[Mapping[str, Any]]]
"""By the names of faults; each as `Trial.as_dict` has it."""

_HEADERS = (
    "fault",
    "times",
    "requests lost",
    "new ones refused",
    "wrong tokens",
    "longest gap, s: p50",
    "worst",
    "all ready, s: p50",
    "worst",
)


def show(trials: Trials) -> None:
    """Print it."""
    table("Faults", _HEADERS, [_row(name, trials[name]) for name in FAULTS if trials.get(name)])
    for name, found in trials.items():
        for error in sorted({error for trial in found for error in trial["errors"]}):
            print(f"{name}: {error}")


def together(runs: Sequence[Trials]) -> Trials:
    """The trials of all runs."""
    names = {name for run in runs for name in run}
    return {name: [trial for run in runs for trial in run.get(name, ())] for name in names}


def _row(name: str, found: Sequence[Mapping[str, Any]]) -> list[str]:
    def total(key: str) -> int:
        return sum(trial[key] for trial in found)

    gaps = [trial["gap_s"] for trial in found]
    ready = [trial["ready_s"] for trial in found]
    notes = {trial["note"] for trial in found if trial["note"]}
    known = [each for each in ready if each is not None]
    return [
        FAULTS[name].title,
        str(len(found)),
        f"{total('lost')} of {total('under_way')}",
        str(total("refused")),
        str(total("wrong")),
        f"{median(gaps):.1f}",
        f"{max(gaps):.1f}",
        f"{median(known):.1f}" if known else "-",
        "; ".join(f"{note} ({len(ready) - len(known)} of {len(ready)})" for note in sorted(notes))
        or f"{max(known):.1f}",
    ]
