"""`python -m benchmarks [NAME [OPTIONS]]`: lists the benchmarks, or runs one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks import capacity, overhead, recovery, startup
from benchmarks.report import Figures, progress, save
from dynamo_local.core.errors import DynamoError


@dataclass(frozen=True)
class Benchmark:
    """One that can be named on the command line."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Awaitable[Figures]]


BENCHMARKS = {
    "overhead": Benchmark(overhead.SUMMARY, overhead.add_arguments, overhead.run),
    "capacity": Benchmark(capacity.SUMMARY, capacity.add_arguments, capacity.run),
    "startup": Benchmark(startup.SUMMARY, startup.add_arguments, startup.run),
    "recovery": Benchmark(recovery.SUMMARY, recovery.add_arguments, recovery.run),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.benchmark is None:
        parser.print_help()
        return 0
    try:
        figures = uvloop.run(_run(arguments))
    except DynamoError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    save(arguments.json, arguments.benchmark, figures)
    progress("done")
    return 0


async def _run(arguments: argparse.Namespace) -> Figures:
    return await BENCHMARKS[arguments.benchmark].run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Each takes less than 6 minutes.")
    commands = parser.add_subparsers(dest="benchmark", title="benchmarks")
    for name, benchmark in BENCHMARKS.items():
        command = commands.add_parser(name, help=benchmark.summary, description=benchmark.summary)
        command.add_argument("--quick", action="store_true", help="fewer and shorter turns: to see that it works")
        command.add_argument("--json", type=Path, metavar="FILE", help="save the figures")
        benchmark.add_arguments(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
