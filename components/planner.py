"""The planner service: adds and removes workers as the load demands, and records why.

Without the graph, beside a running server: `python components/planner.py`, or `dynamo planner`. The planner has no part
in requests: when it fails, the server goes on with its present workers.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, fields

from components.workers import PrefillWorker, VllmWorker
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.process.context import ServiceContext
from dynamo_local.sdk import Service, async_on_start, depends, service
from state.paths import StatePaths

_NO_OPERATION = next(spec for spec in fields(PlannerOptions) if spec.name == "no_operation")


@dataclass(frozen=True)
class PlannerSettings(PlannerOptions):
    """The options of the command line with one other default: a server started with two workers must not have lost one
    after a quiet minute unless the user asked for that."""

    no_operation: bool = field(default=True, metadata=_NO_OPERATION.metadata)


@service(config=PlannerSettings, role="planner")
class Planner(Service):
    """The planner as a service. The dependencies on the workers make it end before them."""

    workers = depends(VllmWorker)
    prefill_workers = depends(PrefillWorker)

    def __init__(self, context: ServiceContext) -> None:
        # Imported here: a frontend imports this module for its dependencies, and needs no supervisor.
        from dynamo_local.planner.decision_log import recorders_of
        from dynamo_local.planner.session import PlannerSession

        options = context.settings(PlannerSettings)
        options.check_fits(sum(one.workers * one.gpu for one in context.graph.services if one.role in ENGINE_ROLES))
        paths = StatePaths.of(context.namespace, os.environ)
        self._context = context
        # Made at once, so that an unwritable folder is an error before the server is up.
        recorders = recorders_of(options, paths)
        self._planning = PlannerSession(paths, options, lambda: recorders, str(context.watcher))

    @async_on_start
    async def start(self) -> None:
        """Start to plan in the background; the first decision waits until the server is up."""
        context = self._context
        context.tasks.spawn("planner", self._planning.run(context.bus, context.tasks))


def main() -> int:
    """Run `dynamo planner` with the arguments of this process."""
    from dynamo_local.cli.main import run

    return run(["planner", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
