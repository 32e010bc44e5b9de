"""`dynamo batch`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dynamo_local.cli.arguments import completion_values
from dynamo_local.cli.arguments.options import JSON_HELP, namespace_option, paths_of_store
from dynamo_local.cli.command_group import CommandGroup

if TYPE_CHECKING:
    from state.stored.batches import BatchStore

_json_option = click.option("--json", "as_json", is_flag=True, help=JSON_HELP)

_INTERRUPTED = 130


@click.group(cls=CommandGroup)
def batch() -> None:
    """Run a file of requests; list and cancel batches.

    `run` sends the requests itself, and ends with the last answer. Batches of the server are ordered by OpenAI's
    client, and run without one.

    \b
    dynamo batch run in.jsonl -o out.jsonl
    dynamo batch list
    dynamo batch cancel batch_5f0c3c3f1b7a4b0e8b1d2a3c
    """


@batch.command()
@click.argument("requests", metavar="IN", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="OUT",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for the results. Lines that have one there already are not run again.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 1024),
    default=32,
    show_default=True,
    metavar="N",
    help="Requests in flight.",
)
@click.option("--url", metavar="URL", help="OpenAI API to ask, with or without /v1.  [default: the server that runs]")
@namespace_option
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File with the API key.  [default: the key in OPENAI_API_KEY]",
)
@_json_option
def run(
    requests: Path,
    output: Path,
    concurrency: int,
    url: str | None,
    namespace: str,
    api_key_file: Path | None,
    *,
    as_json: bool,
) -> int:
    """Run the requests of file IN, with a line for each result in OUT.

    Both have the format of `vllm run-batch`, which is OpenAI's. The requests run behind those of everybody else. Ctrl-C
    ends the command, and the same command goes on where it was. It ends with 1 if a request has failed.

    \b
    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "chat", "messages": [...]}}
    """
    import asyncio
    import os

    from dynamo_local.cli.batches.running import BatchFile
    from dynamo_local.load.asked import read_key
    from dynamo_local.load.http.endpoint import parse_url
    from dynamo_local.monitor.progress_bar import progress_bar

    key = read_key(api_key_file, os.environ)
    endpoint = parse_url(url or _url_of(namespace), key)
    file = BatchFile(requests, output)
    try:
        with progress_bar(file.total, file.done) as advance:
            asyncio.run(file.run(endpoint, concurrency, advance))
    except KeyboardInterrupt:
        click.echo(f"interrupted with {file.done} of {file.total} results; the same command goes on", err=True)
        return _INTERRUPTED
    finally:
        file.close()
    click.echo(file.summary(as_json=as_json))
    return 1 if file.failed else 0


@batch.command(name="list")
@namespace_option
@_json_option
def list_(namespace: str, *, as_json: bool) -> None:
    """List the batches of the server, the newest first."""
    from dynamo_local.cli.batches.text import batches_as_json, table_of_batches

    batches = _store(namespace).listed()
    click.echo(batches_as_json(batches) if as_json else table_of_batches(batches))


@batch.command()
@click.argument("batch_id", metavar="BATCH", shell_complete=completion_values.nothing)
@namespace_option
@_json_option
def show(batch_id: str, namespace: str, *, as_json: bool) -> None:
    """Show batch BATCH, with what is wrong with it."""
    from dynamo_local.cli.batches.text import batch_as_json, description_of_batch

    found = _store(namespace).find(None, batch_id)
    click.echo(batch_as_json(found) if as_json else description_of_batch(found))


@batch.command()
@click.argument("batch_id", metavar="BATCH", shell_complete=completion_values.nothing)
@namespace_option
@_json_option
def cancel(batch_id: str, namespace: str, *, as_json: bool) -> None:
    """Cancel batch BATCH. What was done is kept."""
    import time

    from dynamo_local.cli.batches.text import batch_as_json

    found = _store(namespace).cancel(None, batch_id, time.time())
    click.echo(batch_as_json(found) if as_json else f"{batch_id} is {found.status}")


def _store(namespace: str) -> BatchStore:
    from state.stored.batches import BatchStore
    from state.stored.files import FileStore

    paths = paths_of_store(namespace, "batches")
    return BatchStore(paths, FileStore(paths))


def _url_of(namespace: str) -> str:
    """Return the address of the server that runs. Raises NotRunningError."""
    from dynamo_local.cli.arguments.options import paths_of
    from dynamo_local.core.errors import NotRunningError
    from state.record import read_record

    paths = paths_of(namespace)
    record = read_record(paths)
    if record is None or record.url is None:
        raise NotRunningError(f"the server of namespace {paths.namespace} has no API yet", "see `dynamo wait`")
    return record.url
