"""`python -m benchmarks [NAME [OPTIONS]]`: lists the benchmarks, or runs one."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import faults
from benchmarks.async_tasks import burst
from benchmarks.batches import batch
from benchmarks.batches import kills as batch_kills
from benchmarks.disaggregation import disagg, prefill_queue, prefix_pull
from benchmarks.endpoints import endpoints, kills, orders, turns, wake, wake_kills, zero
from benchmarks.gateway import capacity, first_token, frontends, hostile, overhead, usage_cost
from benchmarks.harness.report import Figures, progress, save
from benchmarks.keys import keys
from benchmarks.machine import first_hour, first_touches, idle, neighbour, parking, sessions, startup, weights, workers
from benchmarks.migration import migration, rebalance
from benchmarks.network import between
from benchmarks.planner import planner
from benchmarks.routing import routing
from benchmarks.scale import environments, fleet, raylets
from dynamo_local.core.errors import DynamoError


@dataclass(frozen=True)
class Benchmark:
    """One that can be named on the command line."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Coroutine[Any, Any, Figures]]


BENCHMARKS = {
    "overhead": Benchmark(overhead.SUMMARY, overhead.add_arguments, overhead.run),
    "first-token": Benchmark(first_token.SUMMARY, first_token.add_arguments, first_token.run),
    "capacity": Benchmark(capacity.SUMMARY, capacity.add_arguments, capacity.run),
    "frontends": Benchmark(frontends.SUMMARY, frontends.add_arguments, frontends.run),
    "startup": Benchmark(startup.SUMMARY, startup.add_arguments, startup.run),
    "first-hour": Benchmark(first_hour.SUMMARY, first_hour.add_arguments, first_hour.run),
    "idle": Benchmark(idle.SUMMARY, idle.add_arguments, idle.run),
    "first-touches": Benchmark(first_touches.SUMMARY, first_touches.add_arguments, first_touches.run),
    "parking": Benchmark(parking.SUMMARY, parking.add_arguments, parking.run),
    "weights": Benchmark(weights.SUMMARY, weights.add_arguments, weights.run),
    "workers": Benchmark(workers.SUMMARY, workers.add_arguments, workers.run),
    "faults": Benchmark(faults.SUMMARY, faults.add_arguments, faults.run),
    "disagg": Benchmark(disagg.SUMMARY, disagg.add_arguments, disagg.run),
    "planner": Benchmark(planner.SUMMARY, planner.add_arguments, planner.run),
    "prefill-queue": Benchmark(prefill_queue.SUMMARY, prefill_queue.add_arguments, prefill_queue.run),
    "prefix-pull": Benchmark(prefix_pull.SUMMARY, prefix_pull.add_arguments, prefix_pull.run),
    "migration": Benchmark(migration.SUMMARY, migration.add_arguments, migration.run),
    "rebalance": Benchmark(rebalance.SUMMARY, rebalance.add_arguments, rebalance.run),
    "task-burst": Benchmark(burst.SUMMARY, burst.add_arguments, burst.run),
    "batch": Benchmark(batch.SUMMARY, batch.add_arguments, batch.run),
    "batch-kills": Benchmark(batch_kills.SUMMARY, batch_kills.add_arguments, batch_kills.run),
    "neighbour": Benchmark(neighbour.SUMMARY, neighbour.add_arguments, neighbour.run),
    "hostile": Benchmark(hostile.SUMMARY, hostile.add_arguments, hostile.run),
    "usage-cost": Benchmark(usage_cost.SUMMARY, usage_cost.add_arguments, usage_cost.run),
    "endpoints": Benchmark(endpoints.SUMMARY, endpoints.add_arguments, endpoints.run),
    "endpoint-kills": Benchmark(kills.SUMMARY, kills.add_arguments, kills.run),
    "endpoint-orders": Benchmark(orders.SUMMARY, orders.add_arguments, orders.run),
    "wake": Benchmark(wake.SUMMARY, wake.add_arguments, wake.run),
    "wake-kills": Benchmark(wake_kills.SUMMARY, wake_kills.add_arguments, wake_kills.run),
    "turns": Benchmark(turns.SUMMARY, turns.add_arguments, turns.run),
    "zero": Benchmark(zero.SUMMARY, zero.add_arguments, zero.run),
    "keys": Benchmark(keys.SUMMARY, keys.add_arguments, keys.run),
    "routing": Benchmark(routing.SUMMARY, routing.add_arguments, routing.run),
    "fleet": Benchmark(fleet.SUMMARY, fleet.add_arguments, fleet.run),
    "environments": Benchmark(environments.SUMMARY, environments.add_arguments, environments.run),
    "between": Benchmark(between.SUMMARY, between.add_arguments, between.run),
    "raylets": Benchmark(raylets.SUMMARY, raylets.add_arguments, raylets.run),
    "sessions": Benchmark(sessions.SUMMARY, sessions.add_arguments, sessions.run),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.benchmark is None:
        parser.print_help()
        return 0
    # As Ctrl-C: what was started is ended. vLLM's own server would leave its engine behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        benchmark = BENCHMARKS[arguments.benchmark]
        figures = uvloop.run(benchmark.run(arguments))
    except DynamoError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    save(arguments.json, arguments.benchmark, figures)
    progress(f"done; the figures are in {arguments.json}" if arguments.json else "done")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Each takes less than 6 minutes, but planner half an hour, and faults two hours.",
    )
    commands = parser.add_subparsers(dest="benchmark", title="benchmarks")
    for name, benchmark in BENCHMARKS.items():
        command = commands.add_parser(name, help=benchmark.summary, description=benchmark.summary)
        command.add_argument("--quick", action="store_true", help="fewer and shorter turns: to see that it works")
        command.add_argument("--json", type=Path, metavar="FILE", help="save the figures")
        benchmark.add_arguments(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
