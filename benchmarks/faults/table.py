"""The table of faults, from the trials of one run or of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.faults.kinds import FAULTS
from benchmarks.harness.report import table
from benchmarks.harness.spread import median

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
    "",
)


def show(side: str, trials: Trials) -> None:
    """Print it."""
    table(f"Faults, {side}", _HEADERS, [_row(name, trials[name]) for name in FAULTS if trials.get(name)])
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

    # After one that has ended the server, no token comes at all.
    survived = [trial for trial in found if not trial["note"]]
    notes = "; ".join(sorted({trial["note"] for trial in found if trial["note"]}))
    what = f"{notes} ({len(found) - len(survived)} of {len(found)})" if notes else ""
    return [
        FAULTS[name].title,
        str(len(found)),
        f"{total('lost')} of {total('under_way')}",
        str(total("refused")),
        str(total("wrong")),
        *_spread([trial["gap_s"] for trial in survived]),
        *_spread([trial["ready_s"] for trial in survived]),
        what,
    ]


def _spread(values: Sequence[float]) -> tuple[str, str]:
    """The median and the worst."""
    return (f"{median(values):.1f}", f"{max(values):.1f}") if values else ("-", "-")
