"""`python -m tests.chaos.soak`: chaos runs with consecutive seeds until there were enough faults.

Reports are kept in a file, and the same command continues from them. The exit code is 1 if a run found a defect, and 2
if the time was up before there were enough faults.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Run = dict[str, Any]
"""A report, as `Report.as_dict` returns it."""


@dataclass(frozen=True)
class Preset:
    """`faults`: in all runs together. `most_faults`, `seconds`, `arguments`: of each run."""

    faults: int
    most_faults: int
    seconds: int
    arguments: tuple[str, ...]


PRESETS = {
    "mocker": Preset(10_000, 2000, 900, ("--faults-per-s=8", "--workers=12", "--streams=32", "--migrations-per-s=3")),
    "vllm": Preset(300, 100, 900, ("--faults-per-s=0.3", "--workers=3", "--streams=6", "--migrations-per-s=1")),
}
_WITHIN_S = 1200
"""Time of a run beyond its faults, to start and to settle, in seconds."""


def main(arguments: list[str]) -> int:
    options, more = _parse(arguments)
    preset = PRESETS[options.engine]
    wanted = options.faults or preset.faults
    file = options.json or Path(f"soak-{options.engine}.json")
    runs: list[Run] = json.loads(file.read_text()) if file.exists() else []
    until = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    while _faults(runs) < wanted and time.monotonic() < until:
        most_faults = min(preset.most_faults, wanted - _faults(runs))
        runs.append(_run(options, preset, options.seed + len(runs), most_faults, more))
        file.write_text(json.dumps(runs, indent=1) + "\n")
        print(_line(runs[-1]), flush=True)
    print(summary(runs))
    if any(run["defects"] for run in runs):
        return 1
    return 0 if _faults(runs) >= wanted else 2


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.soak",
        description=__doc__,
        epilog="All other options go to each run (python -m tests.chaos --help).",
    )
    parser.add_argument("--engine", choices=PRESETS, default="mocker")
    parser.add_argument(
        "--faults", type=int, help="number of faults in all; default: 10,000 with mockers, 300 with vLLM"
    )
    parser.add_argument("--minutes", type=float, help="time after which no further run begins")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first run; each further run has the next")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="file with the reports so far (default: soak-ENGINE.json)"
    )
    return parser.parse_known_args(arguments)


def _run(options: argparse.Namespace, preset: Preset, seed: int, most_faults: int, more: list[str]) -> Run:
    """Run chaos in a process, and return its report. A run that breaks is reported with a defect."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    command = [sys.executable, "-m", "tests.chaos", "--json", f"--engine={options.engine}", f"--keep={folder}"]
    command += [
        f"--seed={seed}",
        f"--seconds={preset.seconds}",
        f"--most-faults={most_faults}",
        *preset.arguments,
        *more,
    ]
    with (folder / "stderr").open("w") as errors:
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                timeout=preset.seconds + _WITHIN_S,
                check=False,
            )
            output = done.stdout[done.stdout.index("{") :]
            run: Run = json.loads(output)
        except (ValueError, subprocess.TimeoutExpired) as error:
            run = {"seed": seed, "defects": [f"the run broke: {type(error).__name__}"]}
    return {**run, "logs": str(folder)}


def _faults(runs: list[Run]) -> int:
    return sum(run.get("fault_count", 0) for run in runs)


def _line(run: Run) -> str:
    seconds, faults = run.get("seconds", 0.0), run.get("fault_count", 0)
    word = "good" if not run["defects"] else f"NOT GOOD ({run['defects'][0]}; {run['logs']})"
    return f"seed {run['seed']}: {faults} faults in {seconds:.0f} s, {run.get('requests', 0)} requests: {word}"


def summary(runs: list[Run]) -> str:
    """Return a summary of all runs."""
    kinds: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    longest: dict[str, float] = {}
    for run in runs:
        kinds.update(run.get("faults", {}))
        outcomes.update(run.get("outcomes", {}))
        for kind, seconds in run.get("longest_gap_s", {}).items():
            longest[kind] = max(longest.get(kind, 0.0), seconds)
    lines = [f"{'fault':<44}{'count':>8}{'longest gap':>14}"]
    lines += [f"  {kind:<42}{count:>8}{longest.get(kind, 0.0):>12.1f} s" for kind, count in kinds.most_common()]
    lines += ["", *(f"  {outcome:<42}{count:>8}" for outcome, count in outcomes.most_common()), ""]
    lines += [f"DEFECT  seed {run['seed']}: {defect}" for run in runs for defect in run["defects"]]
    bad = sum(bool(run["defects"]) for run in runs)
    minutes = sum(run.get("seconds", 0.0) for run in runs) / 60
    what = f"{_faults(runs)} faults in {len(runs)} runs and {minutes:.0f} minutes, {sum(outcomes.values())} requests"
    lines.append(f"{what}: {f'NOT GOOD ({bad} runs)' if bad else 'good'}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
