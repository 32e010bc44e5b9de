"""`python -m benchmarks [NAME [OPTIONS]]`: lists the benchmarks, or runs one. Only the one that runs is imported."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from benchmarks.harness.client import ServerError
from benchmarks.harness.report import progress, save
from dynamo_local.core.errors import DynamoError

MODULES = {
    "overhead": "gateway.overhead",
    "first-token": "gateway.first_token",
    "capacity": "gateway.capacity",
    "frontends": "gateway.frontends",
    "startup": "machine.startup",
    "first-hour": "machine.first_hour",
    "idle": "machine.idle",
    "first-touches": "machine.first_touches",
    "parking": "machine.parking",
    "weights": "machine.weights",
    "workers": "machine.workers",
    "faults": "faults",
    "disagg": "disaggregation.disagg",
    "planner": "planner.planner",
    "prefill-queue": "disaggregation.prefill_queue",
    "prefix-pull": "disaggregation.prefix_pull",
    "migration": "migration.migration",
    "rebalance": "migration.rebalance",
    "task-burst": "async_tasks.burst",
    "batch": "batches.batch",
    "batch-kills": "batches.kills",
    "neighbour": "machine.neighbour",
    "hostile": "gateway.hostile",
    "usage-cost": "gateway.usage_cost",
    "endpoints": "endpoints.endpoints",
    "endpoint-kills": "endpoints.kills",
    "endpoint-orders": "endpoints.orders",
    "order-kills": "endpoints.order_kills",
    "wake": "endpoints.wake",
    "wake-kills": "endpoints.wake_kills",
    "turns": "endpoints.turns",
    "zero": "endpoints.zero",
    "keys": "keys.keys",
    "routing": "routing.routing",
    "fleet": "scale.fleet",
    "environments": "scale.environments",
    "between": "network.between",
    "raylets": "scale.raylets",
    "sessions": "machine.sessions",
}
"""Where each is, below this package: a module with SUMMARY, add_arguments and run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser([name for name in argv[:1] if name in MODULES] or list(MODULES))
    arguments = parser.parse_args(argv)
    if arguments.benchmark is None:
        parser.print_help()
        return 0
    # As Ctrl-C: what was started is ended. vLLM's own server would leave its engine behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        figures = uvloop.run(arguments.run(arguments))
    except (DynamoError, ServerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    save(arguments.json, arguments.benchmark, figures)
    progress(f"done; the figures are in {arguments.json}" if arguments.json else "done")
    return 0


def _parser(names: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Each takes less than 6 minutes, but planner half an hour, and faults two hours.",
    )
    commands = parser.add_subparsers(dest="benchmark", title="benchmarks")
    for name in names:
        module = importlib.import_module(f"benchmarks.{MODULES[name]}")
        command = commands.add_parser(name, help=module.SUMMARY, description=module.SUMMARY)
        command.add_argument("--quick", action="store_true", help="fewer and shorter turns: to see that it works")
        command.add_argument("--json", type=Path, metavar="FILE", help="save the figures")
        command.set_defaults(run=module.run)
        module.add_arguments(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
