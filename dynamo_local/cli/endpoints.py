"""`dynamo endpoint`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dynamo_local.cli import completion
from dynamo_local.cli.commands import CommandGroup
from dynamo_local.cli.options import (
    FiniteRange,
    json_option,
    namespace_option,
    paths_of_kept,
    paths_of_logs,
    server_of,
    together,
)
from dynamo_local.cli.output import Console
from dynamo_local.cli.reports import Shown, log_options, show_of_all_nodes

if TYPE_CHECKING:
    from dynamo_local.control.operations import Operation
    from dynamo_local.supervisor.admin.endpoints import EndpointRow
    from state.paths import StatePaths

_F = TypeVar("_F", bound=Callable[..., Any])

DEFAULT_TIMEOUT_S = 600.0

_TAKES_MORE = {"ignore_unknown_options": True}
"""For commands that take vLLM's options beside their own."""


def order_options(metavar: str, complete: Callable[..., Any]) -> Callable[[_F], _F]:
    """Return a decorator that adds the words of the command, which begin with the endpoint's name, and --namespace."""
    words = click.argument(
        "words", nargs=-1, type=click.UNPROCESSED, metavar=metavar, shell_complete=complete, required=True
    )
    return together(words, namespace_option)


_workers, _seconds = click.IntRange(min=1), FiniteRange(min=0, min_open=True)
spec_options = together(
    click.option("--model", help="Model: a folder, a Hugging Face id, or smollm2, random, quickstart."),
    click.option("--adapter-of", metavar="NAME", help="Endpoint whose workers serve MODEL, a LoRA adapter."),
    click.option("--engine", metavar="ENGINE", help="Engine of the workers: vllm or mocker.  [default: vllm]"),
    click.option(
        "--arg", "args", multiple=True, metavar="KEY=VALUE", help="Setting of workers or frontend. May be repeated."
    ),
    click.option("--gpu", type=float, help="Devices of each worker, or its share of one, such as 0.5."),
    click.option(
        "--min-workers",
        type=click.IntRange(min=0),
        help="Smallest number of workers. 0: none while nobody asks for it; requests wait until one has started."
        "  [default: 1]",
    ),
    click.option("--max-workers", type=_workers, help="Largest number of workers.  [default: the smallest]"),
    click.option("--disagg/--no-disagg", "disaggregated", default=None, help="Prefill long prompts elsewhere."),
    click.option("--min-prefill-workers", type=_workers, help="Smallest number of prefill workers.  [default: 1]"),
    click.option("--max-prefill-workers", type=_workers, help="Largest number of prefill workers."),
    click.option(
        "--park-after",
        "park_after_s",
        type=_seconds,
        metavar="SECONDS",
        help="Time without a request until workers are parked: they keep their devices, and answer again at once."
        "  [default: 60 with --min-workers 0, else never]",
    ),
    click.option(
        "--sleep-after",
        "sleep_after_s",
        type=_seconds,
        metavar="SECONDS",
        help="Time without a request until workers end, with --min-workers 0: their devices are free for others."
        "  [default: 900]",
    ),
    click.option(
        "--awake",
        multiple=True,
        metavar="TIMES",
        help="When it is awake without a request, such as 'mon-fri 08:00-18:30' or 'daily 20:00'. May be repeated.",
    ),
    click.option("--forecast/--no-forecast", default=None, help="Wake it at times at which it was often used."),
    click.option("--requests-per-worker", type=float, help="What policy concurrency aims at.  [default: 16]"),
    click.option(
        "--policy",
        metavar="POLICY",
        help="Policy of scaling: concurrency, load, freeness or dynamo.  [default: concurrency]",
    ),
    click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="Label. May be repeated."),
)
"""An option for each field of an endpoint, None if not given (core/endpoints/spec.py)."""

ways_options = together(
    click.option(
        "--replace",
        is_flag=True,
        help="End the old workers before the new ones are ready, if there is no device for both.",
    ),
    click.option(
        "--roll",
        is_flag=True,
        help="With --adapter-of: raise max-loras and the like of that endpoint, if you have set them too low.",
    ),
)
"""--replace and --roll, which say how an order may be carried out (core/endpoints/checks.py)."""

wait_options = together(
    click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until it is done."),
    click.option(
        "--timeout",
        type=FiniteRange(min=0, min_open=True),
        default=DEFAULT_TIMEOUT_S,
        show_default=True,
        metavar="SECONDS",
        help="How long to wait. What is ordered stays so.",
    ),
    json_option,
)
"""--wait, --timeout and --json."""


@click.group(cls=CommandGroup)
def endpoint() -> None:
    """Create, show, change, park, wake and delete endpoints.

    An endpoint is a model with workers of its own, which a server serves beside others. It stays until it is deleted,
    also when the server ends.

    \b
    dynamo endpoint create chat --model Qwen/Qwen3-0.6B --max-workers 4
    dynamo endpoint list
    dynamo endpoint update chat --max-model-len 8192
    dynamo endpoint delete chat
    """


@endpoint.command(context_settings=_TAKES_MORE)
@order_options("NAME [VLLM_OPTION]...", completion.nothing)
@spec_options
@ways_options
@wait_options
def create(
    words: tuple[str, ...],
    replace: bool,
    roll: bool,
    namespace: str,
    wait: bool,
    timeout: float,
    as_json: bool,
    **given: Any,
) -> None:
    """Create endpoint NAME, and wait until it is ready.

    A VLLM_OPTION is an option of `vllm serve`, such as --max-model-len 4096; other settings of frontend and workers are
    given by --arg. With --adapter-of, MODEL is the folder of a LoRA adapter, which the workers of that endpoint load
    while they run; if they have no room for it, others start that have, and no request fails.
    With --min-workers 0 it costs nothing while nobody uses it: it starts with the first request, which waits meanwhile.

    \b
    dynamo endpoint create chat --model Qwen/Qwen3-0.6B --min-workers 1 --max-workers 4
    dynamo endpoint create code --model ./my-model --gpu 0.5 --max-model-len 4096
    dynamo endpoint create rare --model ./my-model --min-workers 0 --park-after 60 --sleep-after 900
    dynamo endpoint create french --model ./french-lora --adapter-of chat
    """
    from dynamo_local.cli.words import fields_of, name_and_flags, ways
    from dynamo_local.control.operations import CREATE_ENDPOINT
    from dynamo_local.core.endpoints.checks import read_spec
    from dynamo_local.supervisor.server.launch.request import check_settings

    name, flags = name_and_flags(words)
    fields = {"name": name, **fields_of(given, flags)}
    # Checked here as well: mistakes of the command line need no server to be found.
    check_settings(read_spec(fields))
    spec = {key: value for key, value in fields.items() if value is not None} | ways(replace=replace, roll=roll)
    _order(namespace, CREATE_ENDPOINT, "", spec, timeout if wait else None, as_json=as_json)


@endpoint.command()
@click.argument("name", shell_complete=completion.endpoints)
@namespace_option
@json_option
def get(name: str, namespace: str, as_json: bool) -> None:
    """Show everything known of endpoint NAME."""
    from dynamo_local.cli.endpoint_text import as_json_text, description_of

    paths = paths_of_kept(namespace, "endpoints")
    (row,) = _rows(paths, name)
    click.echo(as_json_text(row) if as_json else description_of(row))


@endpoint.command(name="list")
@namespace_option
@json_option
def list_(namespace: str, as_json: bool) -> None:
    """List all endpoints, with their states and workers."""
    from dynamo_local.cli.endpoint_text import as_json_text, table_of

    rows = _rows(paths_of_kept(namespace, "endpoints"))
    click.echo(as_json_text(rows) if as_json else table_of(rows))


@endpoint.command(context_settings=_TAKES_MORE)
@order_options("NAME [VLLM_OPTION]...", completion.endpoints)
@click.option(
    "--set", "set_", multiple=True, metavar="FIELD=VALUE", help="Set a field, such as max_workers=4. May be repeated."
)
@click.option("--unset", multiple=True, metavar="FIELD", help="Give a field its default, such as gpu or args.seed.")
@spec_options
@ways_options
@wait_options
def update(
    words: tuple[str, ...],
    set_: tuple[str, ...],
    unset: tuple[str, ...],
    replace: bool,
    roll: bool,
    namespace: str,
    wait: bool,
    timeout: float,
    as_json: bool,
    **given: Any,
) -> None:
    """Change endpoint NAME, and wait until it answers as changed.

    If workers must be started anew, the new ones start first, and no request fails; if they cannot start, the endpoint
    goes on as before. Numbers of workers, policy and labels change at once. A VLLM_OPTION is one of `vllm serve`.

    \b
    dynamo endpoint update chat --set max_workers=4
    dynamo endpoint update chat --model Qwen/Qwen3-1.7B --max-model-len 8192
    dynamo endpoint update chat --unset args.max-model-len --label team=search
    """
    from dynamo_local.cli.words import changes_of, fields_of, name_and_flags, ways
    from dynamo_local.control.operations import UPDATE_ENDPOINT

    name, flags = name_and_flags(words)
    changes = changes_of(fields_of(given, flags), set_, unset) | ways(replace=replace, roll=roll)
    _order(namespace, UPDATE_ENDPOINT, name, changes, timeout if wait else None, as_json=as_json)


@endpoint.command()
@click.argument("name", shell_complete=completion.endpoints)
@namespace_option
@wait_options
def park(name: str, namespace: str, wait: bool, timeout: float, as_json: bool) -> None:
    """Park the workers of endpoint NAME, once its requests in flight have finished.

    Parked workers keep their processes and their devices, and give the memory of their KV cache back. The next request
    wakes them, within a tenth of a second or so.

    \b
    dynamo endpoint park chat
    dynamo endpoint update chat --park-after 60        # by itself, after a minute without a request
    """
    from dynamo_local.control.operations import PARK_ENDPOINT

    _order(namespace, PARK_ENDPOINT, name, None, timeout if wait else None, as_json=as_json)


@endpoint.command()
@click.argument("name", shell_complete=completion.endpoints)
@namespace_option
@wait_options
def wake(name: str, namespace: str, wait: bool, timeout: float, as_json: bool) -> None:
    """Have a worker of endpoint NAME ready, before anybody asks for it.

    For an endpoint that is parked or asleep; requests wake it by themselves. Without requests it rests again after its
    time.

    \b
    dynamo endpoint wake chat
    dynamo endpoint wake chat --no-wait
    """
    from dynamo_local.control.operations import WAKE_ENDPOINT

    _order(namespace, WAKE_ENDPOINT, name, None, timeout if wait else None, as_json=as_json)


@endpoint.command()
@click.argument("name", shell_complete=completion.endpoints)
@namespace_option
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@wait_options
def delete(name: str, namespace: str, yes: bool, wait: bool, timeout: float, as_json: bool) -> None:
    """Delete endpoint NAME. Its requests in flight are finished first.

    Confirmation is asked for on a terminal only.
    """
    from dynamo_local.supervisor.admin.endpoints import EndpointClient

    client = EndpointClient(server_of(namespace))
    if not yes and sys.stdin.isatty():
        click.confirm(f"Delete endpoint {name}?", abort=True)
    client.delete(name)
    if wait:
        client.wait_until_gone(name, timeout, Console(err=as_json))
    click.echo('{"deleted": true}' if as_json else f"{name} is deleted" if wait else f"{name} is being deleted")


@endpoint.command()
@click.argument("name", shell_complete=completion.endpoints)
@namespace_option
@log_options
def logs(name: str, namespace: str, follow: bool, lines: int | None, since: str | None, level: str | None) -> None:
    """Print the logs of the workers of endpoint NAME, of all its revisions."""
    from dynamo_local.supervisor.server.reports.logs import select_of_endpoint

    paths = paths_of_logs(namespace)
    shown = Shown(follow, lines, since, level)
    show_of_all_nodes(paths, name, lambda: select_of_endpoint(paths.logs_dir, name), shown)


def _order(
    namespace: str,
    operation: Operation,
    name: str,
    fields: dict[str, Any] | None,
    timeout_s: float | None,
    *,
    as_json: bool,
) -> None:
    """Send the order, wait until it is carried out (`timeout_s` None: do not), and print the endpoint as it is then.
    Raises DynamoError."""
    import msgspec

    from dynamo_local.cli.endpoint_text import as_json_text, ordered_text
    from dynamo_local.control.operations import PARK_ENDPOINT, WAKE_ENDPOINT
    from dynamo_local.supervisor.admin.endpoints import ANSWERS, AWAKE, RESTS, EndpointClient

    client = EndpointClient(server_of(namespace))
    view = ordered = client.order(operation, name, fields)
    if timeout_s is not None:
        states = {PARK_ENDPOINT: RESTS, WAKE_ENDPOINT: AWAKE}.get(operation, ANSWERS)
        view = client.wait_until_ready(ordered, timeout_s, Console(err=as_json), states)
        view = msgspec.structs.replace(view, adapter=ordered.adapter)
    click.echo(as_json_text(view) if as_json else ordered_text(view))


def _rows(paths: StatePaths, name: str | None = None) -> list[EndpointRow]:
    from dynamo_local.supervisor.admin.endpoints import list_endpoints, ordered_endpoints
    from state.namespaces import is_running

    if is_running(paths):
        return list_endpoints(paths, name)
    rows = ordered_endpoints(paths, name)
    click.echo(f"no server runs in namespace {paths.namespace}: this is what the next one will serve", err=True)
    return rows
