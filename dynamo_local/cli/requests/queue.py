"""`dynamo queue`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dynamo_local.cli.arguments.options import JSON_HELP, endpoint_option, namespace_option, server_of
from dynamo_local.cli.command_group import CommandGroup
from dynamo_local.cli.output.console import print_json, table

if TYPE_CHECKING:
    from dynamo_local.control.answers import JobRow, QueueView

DEFAULT_JOBS = 100
_HEADERS: tuple[str, ...] = ("REQUEST", "PROMPT", "STATE", "AGE", "EXPIRES", "FRONTEND", "JOB")


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
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
def ls(namespace: str, limit: int, endpoint: str | None, as_json: bool) -> None:
    """List the prefill jobs that wait and those that a worker has taken."""
    import msgspec

    from dynamo_local.control.answers import QueueView
    from dynamo_local.control.operations import READ_QUEUE

    query = {"limit": str(limit), "endpoint": endpoint}
    answer = server_of(namespace).do(READ_QUEUE, query=query)
    if as_json:
        print_json(answer)
    else:
        click.echo(_text(msgspec.convert(answer, QueueView)))


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


def _text(view: QueueView) -> str:
    parts = [_lengths(view.waiting, view.in_hand)]
    if view.jobs:
        headers, rows = _HEADERS, [_cells(job) for job in view.jobs]
        if any(job.endpoint for job in view.jobs):
            headers = ("ENDPOINT", *headers)
            rows = [(job.endpoint or "-", *row) for job, row in zip(view.jobs, rows, strict=True)]
        parts.append(table(headers, rows))
    hidden = view.waiting + view.in_hand - len(view.jobs)
    if hidden > 0:
        parts.append(f"and {hidden} more")
    return "\n".join(parts)


def _lengths(waiting: int, in_hand: int) -> str:
    return f"{waiting} waiting, {in_hand} in hand"


def _cells(job: JobRow) -> tuple[str, ...]:
    age = f"{job.age_s:.1f}s"
    if job.expires_in_s is None:
        return "(not a job)", "-", job.state, age, "-", "-", "-"
    expires = f"{job.expires_in_s:.1f}s" if job.expires_in_s > 0 else "expired"
    return job.request_id or "", str(job.tokens), job.state, age, expires, job.frontend or "", job.job or ""
