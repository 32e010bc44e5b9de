"""`dynamo queue`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dynamo_local.cli.arguments.options import JSON_HELP, endpoint_option, namespace_option, paths_of
from dynamo_local.cli.command_group import CommandGroup
from dynamo_local.cli.output.console import table

if TYPE_CHECKING:
    from dynamo_local.supervisor.admin.queue import JobRow, QueueView

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
    import asyncio

    import msgspec

    from dynamo_local.supervisor.admin.queue import read_queue

    view = asyncio.run(read_queue(paths_of(namespace), limit, endpoint))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(view), indent=2))
    else:
        click.echo(_text(view))


@queue.command()
@namespace_option
@endpoint_option("Drop the jobs of this endpoint only.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
def purge(namespace: str, endpoint: str | None, yes: bool) -> None:
    """Drop all prefill jobs. Decode workers prefill the requests themselves, once the jobs would have expired."""
    import asyncio

    from dynamo_local.supervisor.admin.queue import purge_queue, read_queue

    paths = paths_of(namespace)
    if not yes:
        view = asyncio.run(read_queue(paths, 0, endpoint))
        click.confirm(f"Drop {_lengths(view)}?", abort=True)
    dropped = asyncio.run(purge_queue(paths, endpoint))
    click.echo(f"dropped {dropped} {'job' if dropped == 1 else 'jobs'}")


def _text(view: QueueView) -> str:
    parts = [_lengths(view)]
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


def _lengths(view: QueueView) -> str:
    return f"{view.waiting} waiting, {view.in_hand} in hand"


def _cells(job: JobRow) -> tuple[str, ...]:
    age = f"{job.age_s:.1f}s"
    if job.expires_in_s is None:
        return "(not a job)", "-", job.state, age, "-", "-", "-"
    expires = f"{job.expires_in_s:.1f}s" if job.expires_in_s > 0 else "expired"
    return job.request_id or "", str(job.tokens), job.state, age, expires, job.frontend or "", job.job or ""
