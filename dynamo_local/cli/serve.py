"""`dynamo serve`, also as NVIDIA Dynamo has it (v0.2 and v0.3): values after a space, its own options, its port.

Source of the latter: https://github.com/ai-dynamo/dynamo, docs/guides/planner_benchmark and deploy/sdk.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from dynamo_local.cli import completion
from dynamo_local.cli.options import FiniteRange
from dynamo_local.cli.output import Console
from dynamo_local.core.endpoints.turns import TURN_S
from dynamo_local.core.errors import ConfigError, UsageError
from dynamo_local.core.names import NAMESPACE_ENV
from dynamo_local.core.usage import KEEP_DAYS

if TYPE_CHECKING:
    from dynamo_local.supervisor.server.launch.request import ServeRequest
    from dynamo_local.supervisor.server.settings import ServerSettings

REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "--enable-local-planner": "use --Planner.no-operation=false: the example graphs have a planner",
        "--working-dir": "change to that folder first",
        "--service-name": "leave it out: a process for each service is started",
        "--depends": "leave it out: each process finds the others itself",
        "--enable-system-app": "leave it out: see `dynamo ps` and GET /health",
    }
)
"""Options of Dynamo that are not taken, each with what to do instead."""

_OF_REQUEST = (
    "workers", "prefill_workers", "disagg", "planner", "auto_parsers", "frontends", "nats_url", "nats_ca", "bus_host",
    "cpu_slots", "forkserver", "forget", "environment", "kv_network", "kv_stream",
)  # fmt: skip
"""Options that are fields of the request."""

_ALWAYS_THERE = "/"
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEFAULT_READY_TIMEOUT_S = 600.0
DEFAULT_DRAIN_TIMEOUT_S = 30.0
DEFAULT_RESTART_DELAY_MAX_S = 30.0


def checked(arguments: Sequence[str]) -> Sequence[str]:
    """Return the arguments. Raises UsageError if an option of Dynamo's is among them that is not taken."""
    for argument in arguments:
        if (name := argument.partition("=")[0]) in REMEDIES:
            raise UsageError(f"there is no option {name}", REMEDIES[name])
    return arguments


def join_values(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments with `--Service.key VALUE` written as `--Service.key=VALUE`.

    Only after the target: before it, `--Service.key TARGET` is a switch and the target.
    """
    joined: list[str] = []
    target = False
    for argument in arguments:
        last = joined[-1] if joined else ""
        if not argument.startswith("-") and target and last.startswith("--") and "." in last and "=" not in last:
            joined[-1] = f"{last}={argument}"
            continue
        target = target or not argument.startswith("-")
        joined.append(argument)
    return tuple(joined)


def port_in(config: Path | None, overrides: Iterable[str]) -> int | None:
    """Return the Frontend.port that options or file give, options first; None if neither does. Raises ConfigError."""
    from dynamo_local.sdk.config.sections import read_yaml

    prefix = "--Frontend.port="
    typed = [option.removeprefix(prefix) for option in overrides if option.startswith(prefix)]
    if typed:
        return _port(int(typed[-1]) if typed[-1].isdecimal() else typed[-1], prefix.rstrip("="))
    tree = read_yaml(config) if config is not None else None
    section = tree.get("Frontend") if isinstance(tree, Mapping) else None
    given = section.get("port") if isinstance(section, Mapping) else None
    return None if given is None else _port(given, f"{config}: Frontend.port")


def _port(value: Any, origin: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 65535:
        raise ConfigError(f"{origin} is {value!r}", "write a port from 0 to 65535")
    return value


def leave_unusable_folder() -> str | None:
    """Go to / if no process could be started in the working folder. Returns what is wrong with the folder, or None."""
    try:
        os.chdir(Path.cwd())
    except FileNotFoundError:
        reason = "the working folder was removed"
    except OSError as error:
        reason = f"the working folder cannot be entered ({error.strerror})"
    else:
        return None
    os.chdir(_ALWAYS_THERE)
    return f"{reason}: processes run in {_ALWAYS_THERE}"


class _ServeCommand(click.Command):
    """Takes vLLM's options beside its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Spell out the one short option of vLLM's in which click would see its own -h."""
        return super().parse_args(ctx, ["--data-parallel-hybrid-lb" if word == "-dph" else word for word in args])


@click.command(cls=_ServeCommand, context_settings={"ignore_unknown_options": True})
@click.argument(
    "arguments",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="[MODEL|GRAPH] [VLLM_OPTION]...",
    shell_complete=completion.targets,
)
@click.option("--workers", type=click.IntRange(min=1), help="Number of workers, each with a copy of the model.")
@click.option("--disagg", is_flag=True, help="Compute long prompts on prefill workers, beside the others.")
@click.option("--prefill-workers", type=click.IntRange(min=1), help="Number of prefill workers. Implies --disagg.")
@click.option(
    "--frontends",
    type=click.IntRange(min=1),
    help="Number of frontends, which answer on the one port. Each can use a core.",
)
@click.option("--planner", is_flag=True, help="Let the planner add and remove workers; otherwise it only observes.")
@click.option(
    "--auto-parsers/--no-auto-parsers",
    default=True,
    show_default=True,
    help="Choose parsers of tool calls and of reasoning by the model's family and chat template.",
)
@click.option(
    "--explain", is_flag=True, help="Print each setting that would be chosen, with its reason, and start nothing."
)
@click.option(
    "--help-engine",
    is_flag=False,
    flag_value="",
    metavar="[GROUP|WORD]",
    help="Print vLLM's options: all, those of a group, or those with a word in their name or help.",
)
@click.option(
    "-f", "--file", "config", type=click.Path(path_type=Path), metavar="FILE", help="Configuration file (YAML)."
)
@click.option(
    "--dry-run", is_flag=True, help="Print the processes and settings that would be started, and start nothing."
)
@click.option("--json", "as_json", is_flag=True, help="With --explain or --dry-run: print the result as JSON.")
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
@click.option("--model", help="Model to serve: a folder, a Hugging Face id, or one of smollm2, random, quickstart.")
@click.option("--forget", is_flag=True, help="Drop the endpoints that were created earlier.")
@click.option(
    "--bus-host",
    metavar="ADDRESS",
    help="Address of this machine that the server's NATS listens on, for processes on other machines. On any but "
    "127.0.0.1 it speaks TLS only.",
)
@click.option(
    "--nats-url",
    help="NATS server to use instead of starting one, nats:// or tls://; of a cluster several, separated by commas. "
    "[env: NATS_SERVER, NATS_TOKEN]",
)
@click.option(
    "--nats-ca",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Certificate authority (PEM) of that NATS server, if this machine does not know it. [env: NATS_CA]",
)
@click.option(
    "--kv-network",
    metavar="CIDR",
    help="Network, as 10.1.2.0/24, that you declare closed: workers with an address in it, those of endpoints too, "
    "read KV from each other between machines, without authentication or encryption. "
    "[default: such KV is computed anew]",
)
@click.option(
    "--kv-stream",
    is_flag=True,
    help="Have workers, those of endpoints too, read KV from each other between machines on TLS streams, where the bus "
    "is on TLS too. Excludes --kv-network.",
)
@click.option(
    "--environment",
    default="local",
    show_default=True,
    metavar="NAME",
    help="Where workers live: local, ray (an existing Ray cluster), or MODULE:CLASS of another cluster.",
)
@click.option("--address", help="Address of the cluster, as it takes it. [default: the cluster's own]")
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
    type=FiniteRange(min=0, min_open=True),
    default=DEFAULT_READY_TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="How long all services together may take to become ready.",
)
@click.option(
    "--drain-timeout",
    type=FiniteRange(min=0),
    default=DEFAULT_DRAIN_TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="How long each service may take to end. After that it is killed.",
)
@click.option(
    "--turn-s",
    type=FiniteRange(min=0),
    default=TURN_S,
    show_default=True,
    metavar="SECONDS",
    help="How long an endpoint with requests keeps its devices while other endpoints wait for them.",
)
@click.option(
    "--usage-days",
    type=click.IntRange(min=1),
    default=KEEP_DAYS,
    show_default=True,
    metavar="DAYS",
    help="How long to keep what requests have used, which `dynamo usage` shows.",
)
@click.option(
    "--restart-backoff-max",
    type=FiniteRange(min=0),
    default=DEFAULT_RESTART_DELAY_MAX_S,
    show_default=True,
    metavar="SECONDS",
    help="Longest delay before a service that keeps dying is started again. The delay doubles with each death.",
)
def serve(
    arguments: tuple[str, ...],
    config: Path | None,
    host: str,
    port: int,
    namespace: str | None,
    model: str | None,
    **options: Any,
) -> None:
    """Serve MODEL with workers, a router and the OpenAI API.

    MODEL is a folder, a Hugging Face id, or a name: smollm2, random or quickstart. The settings fit this machine
    (--explain shows them). A VLLM_OPTION is an option of `vllm serve` (--help-engine lists them). The server runs until
    interrupted.

    The configuration file may list endpoints: models that are served as well, at the same address. They stay until they
    are deleted; without MODEL they are all that is served.

    GRAPH (package.module:Service) starts a graph of your own instead. Every configuration key of a service can be given
    as --SERVICE.KEY=VALUE, for example --VllmWorker.max-num-seqs=64. It takes precedence over the configuration file.

    \b
    dynamo serve quickstart
    dynamo serve Qwen/Qwen3-0.6B --workers 2 --max-model-len 8192
    dynamo serve -f models.yaml
    dynamo serve ./my-model --disagg --planner --explain
    dynamo serve examples.llm.graphs.agg_router:Frontend -f agg_router.yaml
    """
    from dynamo_local.cli.serve_output import described, engine_help
    from dynamo_local.cli.words import request_of
    from dynamo_local.engine.vllm.command_line import parse
    from dynamo_local.supervisor.server.launch.plan import HttpAddress
    from dynamo_local.supervisor.server.settings import ServerSettings

    left = leave_unusable_folder()
    if left is not None:
        click.echo(left, err=True)
    if options["help_engine"] is not None:
        click.echo(engine_help(options["help_engine"]))
        return
    _check_output(options)
    line = parse(join_values(checked(arguments)))
    if click.get_current_context().get_parameter_source("port") is ParameterSource.DEFAULT:
        given = port_in(config, line.overrides)
        port = port if given is None else given
    same = {name: options[name] for name in _OF_REQUEST}
    request = request_of(line, model, config, namespace, cluster_address=options["address"], **same)
    if options["explain"] or options["dry_run"]:
        http = HttpAddress(host, port)
        click.echo(described(request, http, explain=options["explain"], as_json=options["as_json"]))
        return
    settings = ServerSettings(
        ready_deadline_s=options["ready_timeout"],
        drain_deadline_s=options["drain_timeout"],
        restart_delay_max_s=options["restart_backoff_max"],
        turn_s=options["turn_s"],
        usage_days=options["usage_days"],
    )
    _start(request, host, port, settings)


def _start(request: ServeRequest, host: str, port: int, settings: ServerSettings) -> None:
    """Serve until a signal comes. Raises DynamoError."""
    from dynamo_local.cli.serve_output import lines_of_start
    from dynamo_local.supervisor.endpoints.controller import endpoint_controller
    from dynamo_local.supervisor.endpoints.revisions.launch import EndpointLauncher
    from dynamo_local.supervisor.server.launch.addresses import claim_address
    from dynamo_local.supervisor.server.launch.machine_room import check_room
    from dynamo_local.supervisor.server.launch.models import ModelSource
    from dynamo_local.supervisor.server.launch.prepare import prepare
    from dynamo_local.supervisor.server.serve import serve as serve_launch
    from state.paths import state_root

    report = Console()
    address = claim_address(host, port)
    # Before a model is fetched, which takes time; and again for the workers, which are known only afterwards.
    check_room(state_root(os.environ))
    launch = prepare(request, address, os.environ, ModelSource(report))
    check_room(launch.paths.root, launch.own_templates, launch.inventory.kind)
    for line in lines_of_start(request, launch):
        report.step(line)
    launcher = EndpointLauncher(launch, report, request.kv_flags, request.forkserver)
    serve_launch(launch, settings, report, endpoint_controller(launcher))


def _check_output(options: Mapping[str, Any]) -> None:
    if options["as_json"] and not (options["dry_run"] or options["explain"]):
        raise UsageError("--json goes with --explain and --dry-run only", "add --explain or --dry-run")
    if options["explain"] and options["dry_run"]:
        raise UsageError("--explain and --dry-run print different things", "give one of the two")
