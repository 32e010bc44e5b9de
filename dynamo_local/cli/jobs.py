"""`dynamo task` and `dynamo batch`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dynamo_local.cli import completion
from dynamo_local.cli.commands import INTERRUPTED, CommandGroup
from dynamo_local.cli.options import json_option, namespace_option, paths_of_kept
from dynamo_local.cli.output import date, facts, print_result, table
from dynamo_local.core.errors import ItemAbsentError

if TYPE_CHECKING:
    from dynamo_local.control.operations import Operation
    from state.paths import StatePaths

_TASK_HEADERS = ("TASK", "STATUS", "MODEL", "PATH", "OWNER", "CREATED")
_BATCH_HEADERS = ("BATCH", "STATUS", "DONE", "FAILED", "LINES", "OWNER", "CREATED")
_ENDS = ("failed", "completed", "expired", "cancelled")
"""Statuses of batches that have ended."""

_task_argument = click.argument("task_id", metavar="TASK", shell_complete=completion.nothing)
_batch_argument = click.argument("batch_id", metavar="BATCH", shell_complete=completion.nothing)


@click.group(cls=CommandGroup)
def task() -> None:
    """List, show and cancel asynchronous tasks.

    Clients order them at /v1/async-tasks. `secret` shows by which secret receivers verify callbacks.

    \b
    dynamo task list
    dynamo task show task_019ac3f2a5d44b1d9a3e5a0c7f2b6d10
    """


@task.command(name="list")
@click.option("--all", "with_ended", is_flag=True, help="Also those that have ended.")
@namespace_option
@json_option
def list_(namespace: str, *, with_ended: bool, as_json: bool) -> None:
    """List the asynchronous tasks of the server that have not ended, the newest first."""
    print_result(_listed("task", namespace, with_ended=with_ended), _table_of_tasks, as_json=as_json)


@task.command()
@_task_argument
@namespace_option
@json_option
def show(task_id: str, namespace: str, *, as_json: bool) -> None:
    """Show asynchronous task TASK. What was asked and answered is its owner's, and not shown."""
    from dynamo_local.control.operations import GET_JOB

    print_result(_do(GET_JOB, "task", task_id, namespace), lambda found: facts(_task_facts(found)), as_json=as_json)


@task.command()
@_task_argument
@namespace_option
@json_option
def cancel(task_id: str, namespace: str, *, as_json: bool) -> None:
    """Cancel asynchronous task TASK, which then has failed. One that has a result keeps it."""
    from dynamo_local.control.operations import CANCEL_JOB

    def text(found: Mapping[str, Any]) -> str:
        return f"{task_id} is {found['status'] if found['has_ended'] else 'being cancelled'}"

    print_result(_do(CANCEL_JOB, "task", task_id, namespace), text, as_json=as_json)


@task.command()
@click.argument("key", metavar="[KEY]", required=False, shell_complete=completion.keys)
@namespace_option
@json_option
def secret(key: str | None, namespace: str, *, as_json: bool) -> None:
    """Show the secret that signs callbacks of the tasks of KEY; without KEY, of a server that needs no key.

    Each key has its own. It stays the same while the key is there, also when the key is rotated.
    """
    import json

    from dynamo_local.core.async_tasks.callbacks import secret_of, secret_text
    from state.async_tasks.secret import callback_secret

    paths = paths_of_kept(namespace, "tasks")
    text = secret_text(secret_of(callback_secret(paths), _owner_of(key, paths)))
    click.echo(json.dumps({"secret": text}) if as_json else text)


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
@json_option
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

    from dynamo_local.cli.batch_file import BatchFile
    from dynamo_local.load.asked import read_key
    from dynamo_local.load.client import parse_url
    from dynamo_local.monitor.progress_bar import progress_bar

    key = read_key(api_key_file, os.environ)
    endpoint = parse_url(url or _url_of(namespace), key)
    file = BatchFile(requests, output)
    try:
        with progress_bar(file.total, file.done) as advance:
            asyncio.run(file.run(endpoint, concurrency, advance))
    except KeyboardInterrupt:
        click.echo(f"interrupted with {file.done} of {file.total} results; the same command goes on", err=True)
        return INTERRUPTED
    finally:
        file.close()
    click.echo(file.summary(as_json=as_json))
    return 1 if file.failed else 0


@batch.command(name="list")
@namespace_option
@json_option
def list_batches(namespace: str, *, as_json: bool) -> None:
    """List the batches of the server, the newest first."""
    print_result(_listed("batch", namespace, with_ended=True), _table_of_batches, as_json=as_json)


@batch.command(name="show")
@_batch_argument
@namespace_option
@json_option
def show_batch(batch_id: str, namespace: str, *, as_json: bool) -> None:
    """Show batch BATCH, with what is wrong with it."""
    from dynamo_local.control.operations import GET_JOB

    print_result(_do(GET_JOB, "batch", batch_id, namespace), lambda found: facts(_batch_facts(found)), as_json=as_json)


@batch.command(name="cancel")
@_batch_argument
@namespace_option
@json_option
def cancel_batch(batch_id: str, namespace: str, *, as_json: bool) -> None:
    """Cancel batch BATCH. What was done is kept."""
    from dynamo_local.control.operations import CANCEL_JOB

    found = _do(CANCEL_JOB, "batch", batch_id, namespace)
    print_result(found, lambda found: f"{batch_id} is {found['status']}", as_json=as_json)


def _listed(kind: str, namespace: str, *, with_ended: bool) -> Sequence[Mapping[str, Any]]:
    from dynamo_local.control.operations import LIST_JOBS

    query = {"kind": kind, "ended": "true" if with_ended else "false"}
    return _ask(LIST_JOBS, _paths(kind, namespace), query=query)["data"]  # type: ignore[no-any-return]


def _do(operation: Operation, kind: str, job: str, namespace: str) -> Any:
    """Return what is told of a job, which the operation may cancel. Raises ItemAbsentError."""
    paths = _paths(kind, namespace)
    if not job.startswith(f"{kind}_"):
        raise ItemAbsentError(f"no such {kind}: {job[:64]}")
    return _ask(operation, paths, job)


def _ask(operation: Operation, paths: StatePaths, job: str = "", query: Mapping[str, str] | None = None) -> Any:
    """Have the server answer, or, while none runs, this process."""
    from dynamo_local.control.client import ControlClient
    from state.namespaces import is_running

    if is_running(paths):
        return ControlClient(paths).do(operation, query=query, job=job)
    from dynamo_local.control.operations import Call
    from dynamo_local.supervisor.jobs import Jobs

    return Jobs(paths).do(operation, Call({"job": job}, query or {}))


def _paths(kind: str, namespace: str) -> StatePaths:
    return paths_of_kept(namespace, {"task": "tasks", "batch": "batches"}[kind])


def _owner_of(key: str | None, paths: StatePaths) -> str:
    """Return the owner of what is stored for a key by its name; None: where no key is needed. Raises KeyAbsentError,
    StateError."""
    from dynamo_local.core.errors import KeyAbsentError
    from dynamo_local.core.keys.registry import RESERVED
    from state.keys import read_key_registry

    if key is None:
        return ""
    if key in RESERVED:
        return key
    found = next((each for each in read_key_registry(paths).keys.values() if each.name == key), None)
    if found is None:
        raise KeyAbsentError(f"there is no key {key[:60]!r}", "see `dynamo key list`")
    return found.owner


def _url_of(namespace: str) -> str:
    """Return the address of the server that runs. Raises NotRunningError."""
    from dynamo_local.cli.options import paths_of
    from dynamo_local.core.errors import NotRunningError
    from state.record import read_record

    paths = paths_of(namespace)
    record = read_record(paths)
    if record is None or record.url is None:
        raise NotRunningError(f"the server of namespace {paths.namespace} has no API yet", "see `dynamo wait`")
    return record.url


def _table_of_tasks(tasks: Sequence[Mapping[str, Any]]) -> str:
    return table(_TASK_HEADERS, list(map(_task_cells, tasks))) if tasks else "there are no such tasks"


def _task_cells(task: Mapping[str, Any]) -> tuple[str, ...]:
    created = date(task["created_at"]) if "created_at" in task else ""
    return task["task_id"], task["status"], task.get("model", ""), task.get("path", ""), task["owner"], created


def _task_facts(task: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "task", task["task_id"]
    yield "status", task["status"]
    yield "owner", task["owner"]
    if "model" not in task:
        # It cannot be read.
        return
    yield "model", task["model"]
    yield "path", task["path"]
    yield "priority", str(task["priority"])
    yield "created", date(task["created_at"])
    yield "ended", _date(task["ended_at"])
    if task["callback"] is not None:
        last = task["callback_last"]
        then = "" if last is None else f", the last one: {last['outcome']}, {date(last['at'])}"
        yield "callback", f"{task['callback']}: {task['callback_calls']} calls{then}"
        yield "receiver", task["callback_receiver"]
    if task["status_code"] is not None:
        yield "answered", f"status {task['status_code']}, {task['answer_bytes']} bytes"


def _table_of_batches(batches: Sequence[Mapping[str, Any]]) -> str:
    return table(_BATCH_HEADERS, list(map(_batch_cells, batches))) if batches else "there are no batches"


def _batch_cells(batch: Mapping[str, Any]) -> tuple[str, ...]:
    counts = batch["request_counts"]
    numbers = (str(counts[name]) for name in ("completed", "failed", "total"))
    return batch["id"], batch["status"], *numbers, batch["owner"], date(batch["created_at"])


def _batch_facts(batch: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    counts = batch["request_counts"]
    ended = next((at for how in _ENDS if (at := batch[f"{how}_at"])), None)
    yield "batch", batch["id"]
    yield "status", batch["status"]
    yield "lines", f"{counts['total']}: {counts['completed']} answered, {counts['failed']} failed"
    yield "path", batch["endpoint"]
    yield "owner", batch["owner"]
    yield "created", date(batch["created_at"])
    yield "ended", _date(ended)
    yield "expires", "" if batch["status"] in _ENDS else date(batch["expires_at"])
    yield "input", batch["input_file_id"]
    yield "output", batch["output_file_id"] or ""
    yield "errors", batch["error_file_id"] or ""
    yield "wrong", "\n".join(error["message"] for error in (batch["errors"] or {"data": ()})["data"])


def _date(at: float | None) -> str:
    return "" if at is None else date(at)
