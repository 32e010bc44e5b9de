"""`dynamo planner`."""

from __future__ import annotations

import logging
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import click

from dynamo_local.cli.options import namespace_option, paths_of

if TYPE_CHECKING:
    from dynamo_local.planner.session import PlannerSession
    from dynamo_local.sdk.config.schema import KeySpec


class PlannerCommand(click.Command):
    """A command with every field of PlannerOptions as an option. They are read only when this command runs, so that
    other commands start fast."""

    @cached_property
    def planner_options(self) -> list[click.Parameter]:
        from dynamo_local.core.planning.options import PlannerOptions
        from dynamo_local.sdk.config.schema import schema_of

        return [_option(spec) for spec in schema_of(PlannerOptions).keys().values()]

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        own = super().get_params(ctx)
        return [*self.params, *self.planner_options, *(param for param in own if param not in self.params)]


def _option(spec: KeySpec) -> click.Option:
    if spec.kind == "bool":
        return click.Option([f"--{spec.name}"], is_flag=True, default=spec.default, help=spec.help)
    types = {"int": click.INT, "float": click.FLOAT, "str": click.STRING}
    kind = click.Choice([str(choice) for choice in spec.choices]) if spec.choices else types[spec.kind]
    shown = spec.default is not None
    return click.Option([f"--{spec.name}"], type=kind, default=spec.default, show_default=shown, help=spec.help)


@click.command(cls=PlannerCommand)
@namespace_option
def planner(namespace: str, **given: Any) -> None:
    """Add and remove workers with the load, until interrupted.

    The graphs of examples/llm have a planner of their own. That one only observes, unless its key no-operation is set
    to false. Only one planner of a server may change workers.

    \b
    dynamo planner --no-operation         print what would be done
    dynamo planner --max-gpu-budget 4     use at most four devices
    """
    import asyncio

    from dynamo_local.core.planning.options import PlannerOptions
    from dynamo_local.planner.decision_log import recorders_of
    from dynamo_local.planner.session import PlannerSession

    # First, so that wrong options are an error before the server is contacted.
    options = PlannerOptions(**given)
    paths = paths_of(namespace)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    asyncio.run(_until_signal(PlannerSession(paths, options, partial(recorders_of, options, paths))))


async def _until_signal(planning: PlannerSession) -> None:
    import asyncio
    import signal

    from dynamo_local.planner.session import plan_by_hand

    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    await plan_by_hand(planning, stop)
