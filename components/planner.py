"""The planner service: has as many workers run as the load asks for, and says why.

By hand, beside a running server: `python components/planner.py`, or `dynamo planner`. It holds no request and
nobody calls it: without it, everything else goes on with the workers there are.
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
    """As on the command line, but for one default: who serves two workers is not to find one after a quiet minute."""

    no_operation: bool = field(default=True, metadata=_NO_OPERATION.metadata)


@service(config=PlannerSettings, role="planner")
class Planner(Service):
    """Depends on the workers so that it ends before them."""

    workers = depends(VllmWorker)
    prefill_workers = depends(PrefillWorker)

    def __init__(self, context: ServiceContext) -> None:
        # Here, so that a frontend, which names this service as a dependency, need not load the supervisor.
        from dynamo_local.planner.recorders import recorders_of
        from dynamo_local.planner.session import PlannerSession

        options = context.settings(PlannerSettings)
        options.check_fits(sum(one.workers * one.gpu for one in context.graph.services if one.role in ENGINE_ROLES))
        paths = StatePaths.of(context.namespace, os.environ)
        self._context = context
        # Made at once: what cannot be written to is said before the server is up.
        recorders = recorders_of(options, paths)
        self._planning = PlannerSession(paths, options, lambda: recorders, str(context.watcher))

    @async_on_start
    async def start(self) -> None:
        """Plan from now on, once the server is up."""
        context = self._context
        context.tasks.spawn("planner", self._planning.run(context.bus, context.tasks))


def main() -> int:
    """The same as `dynamo planner`."""
    from dynamo_local.cli.main import run

    return run(["planner", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
