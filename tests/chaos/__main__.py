"""`python -m tests.chaos`: runs chaos, and prints a report. The exit code is 1 if the run found a defect."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import random
import shutil
import sys
import tempfile
from pathlib import Path

from dynamo_local.process.ancestry import die_with_parent
from tests.chaos.faults import Kind
from tests.chaos.report import Report
from tests.chaos.run import run_on_mockers
from tests.chaos.run_vllm import ON_DISAGG_VLLM, ON_VLLM, run_on_vllm
from tests.chaos.settings import ON_DISAGG, ChaosSettings
from tests.chaos.surroundings import private


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    directory = Path(options.keep) if options.keep else Path(tempfile.mkdtemp(prefix="chaos-"))
    directory.mkdir(parents=True, exist_ok=True)
    why_not = "--shared-disk is given" if options.shared_disk else private.why_not()
    if why_not is None and not private.is_private():
        seed, keep = f"--seed={options.seed}", f"--keep={directory}"
        return private.enter(directory / "disk", "tests.chaos", [*arguments, seed, keep])
    if private.is_private():
        die_with_parent()
    print(f"seed {options.seed}", flush=True)
    if why_not is not None:
        print(f"neither a disk nor /dev/shm is filled up: {why_not}", file=sys.stderr)
    # The product's parts in this process log beside the processes of the server.
    logging.basicConfig(
        filename=directory / "frontend.log", level=logging.INFO, format="%(asctime)s %(name)s: %(message)s"
    )
    try:
        report = _run(options, private.disk() or directory)
    finally:
        if (disk := private.disk()) is not None:
            # The private file system ends with this process.
            shutil.copytree(disk, directory / "logs", ignore=_not_logs, dirs_exist_ok=True)
        print(f"logs: {directory}", file=sys.stderr)
    print(json.dumps(report.as_dict(), indent=2) if options.json else report.as_text())
    return 1 if report.defects else 0


def _not_logs(folder: str, names: list[str]) -> list[str]:
    return [] if folder.endswith(".logs") else [name for name in names if not name.endswith((".logs", "state"))]


def _parse(arguments: list[str]) -> argparse.Namespace:
    defaults = ChaosSettings()
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--engine", choices=("mocker", "vllm"), default="mocker")
    parser.add_argument("--graph", choices=("agg", "disagg"), default="agg", help="disagg: with prefill workers")
    parser.add_argument(
        "--real-model",
        action="store_true",
        help="with --engine vllm: use a real language model, and check that each token is the greedy one",
    )
    parser.add_argument("--seconds", type=float, default=defaults.seconds, help="duration of the faults")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="default: random")
    parser.add_argument(
        "--workers", type=int, default=None, help="default: 8 mockers, 4 mockers with --graph disagg, or 2 vLLM workers"
    )
    parser.add_argument(
        "--prefill-workers", type=int, default=None, help="with --graph disagg; default: 4 mockers, or 2 vLLM workers"
    )
    parser.add_argument(
        "--streams", type=int, default=None, help="requests in flight; default: 64 with mockers, 6 with vLLM"
    )
    parser.add_argument(
        "--faults-per-s", type=float, default=None, help="rate of faults; lower if too few workers are left"
    )
    parser.add_argument(
        "--migrations-per-s", type=float, default=None, help="maximum rate of orders to migrate a request"
    )
    parser.add_argument(
        "--least-migrations", type=int, default=None, help="continue until this many requests have migrated"
    )
    kinds = [kind.name for kind in Kind]
    parser.add_argument(
        "--only", nargs="+", choices=kinds, metavar="KIND", help=f"only these kinds of faults, of {', '.join(kinds)}"
    )
    parser.add_argument("--without", nargs="+", choices=kinds, metavar="KIND", help="all kinds of faults but these")
    parser.add_argument("--most-faults", type=int, default=None, help="end after this many faults")
    parser.add_argument(
        "--gap-slack-s", type=float, default=None, help="time by which gaps may exceed what faults explain"
    )
    parser.add_argument(
        "--stall-s", type=float, default=None, help="time without a token after which a request counts as forgotten"
    )
    parser.add_argument(
        "--settle-s", type=float, default=None, help="time after the faults within which all must be idle"
    )
    parser.add_argument("--shared-disk", action="store_true", help="use no private file systems, and fill none up")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--keep", help="directory for the logs; default: a new temporary directory")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace, directory: Path) -> Report:
    names = {field.name for field in dataclasses.fields(ChaosSettings)}
    given = {name: value for name, value in vars(options).items() if name in names and value is not None}
    if options.engine == "vllm":
        preset = ON_DISAGG_VLLM if options.graph == "disagg" else ON_VLLM
        return run_on_vllm(ChaosSettings(**{**preset, **given}), directory / "state")
    preset = ON_DISAGG if options.graph == "disagg" else {}
    return run_on_mockers(ChaosSettings(**{**preset, **given}), directory / "state")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
