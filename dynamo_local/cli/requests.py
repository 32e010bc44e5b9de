"""`dynamo requests`, `migrate` and `queue`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

from dynamo_local.cli import completion
from dynamo_local.cli.commands import CommandGroup
from dynamo_local.cli.options import endpoint_option, json_option, namespace_option, server_of
from dynamo_local.cli.output import print_result, table
from dynamo_local.core.errors import UsageError
from dynamo_local.core.names import MAIN, short_watcher

if TYPE_CHECKING:
    from dynamo_local.control.answers import JobRow, QueueView, RequestsView
    from dynamo_local.core.messages.admin import MigrationResult, RequestLine

_REQUEST_HEADERS: tuple[str, ...] = ("REQUEST", "ENDPOINT", "WORKER", "EPOCH", "PROMPT", "TOKENS", "AGE", "MIGRATES")

_MIGRATED_WITHIN_S = 150.0
"""Longer than the server waits."""
_MIGRATION_HEADERS = ("REQUEST", "OUTCOME", "WORKER", "GAP", "STEPS", "WHY")
DEFAULT_JOBS = 100
_JOB_HEADERS: tuple[str, ...] = ("ENDPOINT", "REQUEST", "PROMPT", "STATE", "AGE", "EXPIRES", "FRONTEND", "JOB")


@click.command()
@namespace_option
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(min=0),
    default=100,
    show_default=True,
    help="Maximum number of requests to show of each frontend, oldest first.",
)
@click.option("--worker", metavar="WATCHER", help="Show the requests of this worker only.")
@endpoint_option("Show the requests for this endpoint only.")
@json_option
def requests(namespace: str, limit: int, worker: str | None, endpoint: str | None, as_json: bool) -> None:
    """List the requests in flight, with their workers.

    The table has the worker, epoch, tokens and age of each request, and whether it can migrate. The epoch counts the
    request's assignments to workers. It is above 1 if the request has migrated, was recovered from a lost worker, or
    had its prompt prefilled by another worker. A request that is held until a worker is ready has no id yet: its worker
    is shown as `held`, with the reason at the end.

    \b
    dynamo requests
    dynamo requests --endpoint chat
    dynamo requests --json -n 1000
    """
    import msgspec

    from dynamo_local.control.answers import RequestsView
    from dynamo_local.control.operations import LIST_REQUESTS

    query = {"limit": str(limit), "worker": worker, "endpoint": endpoint}
    answer = server_of(namespace).do(LIST_REQUESTS, query=query)
    print_result(answer, lambda it: _requests_text(msgspec.convert(it, RequestsView)), as_json=as_json)


def _requests_text(view: RequestsView) -> str:
    shown = table_of_requests(view.requests)
    return f"{shown}\nand {view.left_out} more" if view.left_out else shown


def table_of_requests(lines: Sequence[RequestLine]) -> str:
    """Return the lines as text, with a column of endpoints if any request is for one."""
    without = _without_endpoints(line.endpoint for line in lines)
    return table(_REQUEST_HEADERS, list(map(_request_cells, lines)), without)


def _without_endpoints(endpoints: Iterable[str]) -> tuple[str, ...]:
    """The column to leave out where the graph's own model is the only one."""
    return ("ENDPOINT",) if set(endpoints) <= {"", MAIN} else ()


def _request_cells(line: RequestLine) -> tuple[str, ...]:
    named = line.request, line.endpoint or "-"
    if line.held is not None:
        return *named, "held", "-", "-", "-", f"{line.age_s:.1f}s", f"waits: {line.held}"
    migrates = f"no: {line.stays}" if line.stays else "yes"
    if line.moving_to is not None:
        migrates = f"to {short_watcher(line.moving_to)}"
    counts = (str(line.epoch), str(line.prompt_tokens), str(line.tokens))
    return *named, short_watcher(line.worker or "-"), *counts, f"{line.age_s:.1f}s", migrates


@click.command()
@click.argument("request", required=False, shell_complete=completion.requests)
@namespace_option
@click.option(
    "--from",
    "source",
    metavar="WATCHER",
    shell_complete=completion.workers,
    help="Migrate all requests of this worker.",
)
@click.option(
    "--to",
    "destination",
    metavar="WATCHER",
    help="Destination worker.  [default: the worker with the most free capacity]",
)
@click.option("--cold", is_flag=True, help="Do not copy the KV cache; the destination computes it again.")
@json_option
def migrate(
    namespace: str, request: str | None, source: str | None, destination: str | None, cold: bool, as_json: bool
) -> None:
    """Migrate running requests to another worker.

    The KV cache migrates with a request, and its client receives every token once.

    REQUEST is the id that the client received, as `dynamo requests` shows it, or its first characters. Give either
    REQUEST or --from.

    \b
    dynamo migrate cmpl-92fe
    dynamo migrate --from VllmWorker_1 --to VllmWorker
    """
    import msgspec

    from dynamo_local.control.operations import MIGRATE
    from dynamo_local.core.messages.admin import MigrationResult

    if (request is None) == (source is None):
        raise UsageError("name either a request or a worker to migrate from", "give REQUEST or --from WATCHER")
    wish = {"request": request, "from": source, "to": destination, "cold": cold}
    answer = server_of(namespace).do(MIGRATE, wish, timeout_s=_MIGRATED_WITHIN_S)["data"]
    print_result(answer, lambda it: _migrated_text(msgspec.convert(it, list[MigrationResult])), as_json=as_json)


def _migrated_text(found: Sequence[MigrationResult]) -> str:
    return table(_MIGRATION_HEADERS, list(map(_migration_cells, found))) if found else "there is no request to migrate"


def _migration_cells(line: MigrationResult) -> tuple[str, ...]:
    gap = "-" if line.gap_s is None else f"{line.gap_s * 1e3:.0f}ms"
    steps = "-" if line.gap_steps is None else f"{line.gap_steps:.1f}"
    return line.request, line.outcome, short_watcher(line.worker or "-"), gap, steps, line.why


@click.group(cls=CommandGroup)
def queue() -> None:
    """List or drop the jobs of the prefill queues.

    There is one queue for the server's own model, and one for each endpoint with prefill workers.

    \b
    dynamo queue ls -n 20
    dynamo queue purge
    """


@queue.command()
@namespace_option
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(min=0),
    default=DEFAULT_JOBS,
    show_default=True,
    help="Maximum number of jobs to show, oldest first.",
)
@endpoint_option("Show the queue of this endpoint only.")
@json_option
def ls(namespace: str, limit: int, endpoint: str | None, as_json: bool) -> None:
    """List the prefill jobs that wait and those that a worker has taken."""
    import msgspec

    from dynamo_local.control.answers import QueueView
    from dynamo_local.control.operations import READ_QUEUE

    query = {"limit": str(limit), "endpoint": endpoint}
    answer = server_of(namespace).do(READ_QUEUE, query=query)
    print_result(answer, lambda it: _queue_text(msgspec.convert(it, QueueView)), as_json=as_json)


@queue.command()
@namespace_option
@endpoint_option("Drop the jobs of this endpoint only.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
def purge(namespace: str, endpoint: str | None, yes: bool) -> None:
    """Drop all prefill jobs. Decode workers prefill the requests themselves, once the jobs would have expired."""
    from dynamo_local.control.operations import PURGE_QUEUE, READ_QUEUE

    client = server_of(namespace)
    if not yes:
        there = client.do(READ_QUEUE, query={"limit": "0", "endpoint": endpoint})
        click.confirm(f"Drop {_lengths(there['waiting'], there['in_hand'])}?", abort=True)
    dropped = client.do(PURGE_QUEUE, query={"endpoint": endpoint})["dropped"]
    click.echo(f"dropped {dropped} {'job' if dropped == 1 else 'jobs'}")


def _queue_text(view: QueueView) -> str:
    parts = [_lengths(view.waiting, view.in_hand)]
    if view.jobs:
        without = _without_endpoints(job.endpoint for job in view.jobs)
        parts.append(table(_JOB_HEADERS, list(map(_job_cells, view.jobs)), without))
    hidden = view.waiting + view.in_hand - len(view.jobs)
    if hidden > 0:
        parts.append(f"and {hidden} more")
    return "\n".join(parts)


def _lengths(waiting: int, in_hand: int) -> str:
    return f"{waiting} waiting, {in_hand} in hand"


def _job_cells(job: JobRow) -> tuple[str, ...]:
    endpoint, age = job.endpoint or "-", f"{job.age_s:.1f}s"
    if job.expires_in_s is None:
        return endpoint, "(not a job)", "-", job.state, age, "-", "-", "-"
    expires = f"{job.expires_in_s:.1f}s" if job.expires_in_s > 0 else "expired"
    return endpoint, job.request_id or "", str(job.tokens), job.state, age, expires, job.frontend or "", job.job or ""
