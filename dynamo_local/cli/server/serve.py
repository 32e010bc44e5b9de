"""`dynamo serve`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from dynamo_local.cli.console import Console
from dynamo_local.core.errors import UsageError
from dynamo_local.core.names import NAMESPACE_ENV

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEFAULT_READY_TIMEOUT_S = 600.0
DEFAULT_DRAIN_TIMEOUT_S = 30.0
DEFAULT_RESTART_DELAY_MAX_S = 30.0


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="MODULE:SERVICE [--SERVICE.KEY=VALUE]...")
@click.option(
    "-f", "--file", "config", type=click.Path(path_type=Path), metavar="FILE", help="Configuration file (YAML)."
)
@click.option(
    "--dry-run", is_flag=True, help="Print the processes and settings that would be started, and start nothing."
)
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print the result as JSON.")
@click.option("--host", default=DEFAULT_HOST, show_default=True, help="Address that the API listens on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    help="Port that the API listens on; 0 chooses a free port.",
)
@click.option(
    "--namespace",
    envvar=NAMESPACE_ENV,
    show_envvar=True,
    help="Namespace of the server. It tells the servers of one machine apart.  [default: the graph's own]",
)
@click.option("--model", help='Model to serve: a Hugging Face id, a folder, or "quickstart".')
@click.option("--nats-url", help="NATS server to use instead of starting one. [env: NATS_SERVER, NATS_TOKEN]")
@click.option(
    "--cpu-slots",
    type=click.IntRange(min=1),
    help="Number of CPU slots to run workers on, instead of GPUs or one slot per core. "
    "Other servers may share the cores. [env: DYN_CPU_SLOTS]",
)
@click.option(
    "--forkserver/--no-forkserver",
    default=True,
    show_default=True,
    help="Import vLLM once and fork the services from that process; otherwise each service imports vLLM itself.",
)
@click.option(
    "--ready-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=DEFAULT_READY_TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="How long all services together may take to become ready.",
)
@click.option(
    "--drain-timeout",
    type=click.FloatRange(min=0),
    default=DEFAULT_DRAIN_TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="How long each service may take to end. After that it is killed.",
)
@click.option(
    "--restart-backoff-max",
    type=click.FloatRange(min=0),
    default=DEFAULT_RESTART_DELAY_MAX_S,
    show_default=True,
    metavar="SECONDS",
    help="Longest delay before a service that keeps dying is started again. The delay doubles with each death.",
)
def serve(
    arguments: tuple[str, ...],
    config: Path | None,
    dry_run: bool,
    as_json: bool,
    host: str,
    port: int,
    namespace: str | None,
    model: str | None,
    nats_url: str | None,
    cpu_slots: int | None,
    forkserver: bool,
    ready_timeout: float,
    drain_timeout: float,
    restart_backoff_max: float,
) -> None:
    """Start a server for the graph MODULE:SERVICE.

    MODULE:SERVICE names the root service of the graph. The server runs until interrupted.

    Every configuration key of a service can be given as --SERVICE.KEY=VALUE, for example --VllmWorker.max-num-seqs=64
    or --VllmWorker.ServiceArgs.workers=2. It takes precedence over the configuration file.
    """
    from dynamo_local.cli.server.dry_run import as_json as dry_run_json
    from dynamo_local.cli.server.dry_run import as_text as dry_run_text
    from dynamo_local.supervisor.server.launch import ServeRequest, prepare
    from dynamo_local.supervisor.server.listening import claim_address
    from dynamo_local.supervisor.server.plan import HttpAddress
    from dynamo_local.supervisor.server.serve import serve as run_server
    from dynamo_local.supervisor.server.server import ServerSettings
    from dynamo_local.supervisor.upkeep.devices import beside
    from state.holding import held_elsewhere

    if as_json and not dry_run:
        raise UsageError("--json goes with --dry-run only", "add --dry-run")
    target, overrides = _split(arguments)
    request = ServeRequest(target, config, overrides, namespace, model, nats_url, cpu_slots, forkserver)
    if dry_run:
        planned = prepare(request, HttpAddress(host, port), os.environ)
        planned = beside(planned, held_elsewhere(planned.inventory, os.getpid()))
        click.echo(dry_run_json(planned) if as_json else dry_run_text(planned))
        return
    launch = prepare(request, claim_address(host, port), os.environ, _quickstart_model)
    settings = ServerSettings(
        ready_deadline_s=ready_timeout, drain_deadline_s=drain_timeout, restart_delay_max_s=restart_backoff_max
    )
    run_server(launch, settings, Console())


def _split(arguments: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Split the arguments into the target and the options of services, in any order. Raises UsageError."""
    overrides = tuple(argument for argument in arguments if argument.startswith("-"))
    targets = [argument for argument in arguments if not argument.startswith("-")]
    if not targets:
        raise UsageError("no graph named", "write `dynamo serve MODULE:SERVICE`")
    if len(targets) > 1:
        raise UsageError(f"{targets[1]!r} is one argument too many", "write values as --Service.key=value")
    for option in overrides:
        name = option.partition("=")[0]
        if not option.startswith("--") or "." not in name:
            raise UsageError(f"there is no option {name}", "see `dynamo serve --help`")
    return targets[0], overrides


def _quickstart_model() -> Path:
    from dynamo_local.quickstart import quickstart_model

    return quickstart_model()
