"""`dynamo task`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dynamo_local.cli.arguments import completion_values
from dynamo_local.cli.arguments.options import JSON_HELP, namespace_option, paths_of_store
from dynamo_local.cli.command_group import CommandGroup

if TYPE_CHECKING:
    from state.async_tasks.store import TaskStore

_json_option = click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
_task_argument = click.argument("task_id", metavar="TASK", shell_complete=completion_values.nothing)


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
@_json_option
def list_(namespace: str, *, with_ended: bool, as_json: bool) -> None:
    """List the asynchronous tasks of the server that have not ended, the newest first."""
    from dynamo_local.cli.async_tasks.text import Listed, table_of_tasks, tasks_as_json

    store = _store(namespace)
    found = store.all() if with_ended else store.look().running
    tasks = [Listed.read(store, owner, name) for owner, name in sorted(found, key=lambda each: each[1], reverse=True)]
    shown = [each for each in tasks if each is not None]
    click.echo(tasks_as_json(shown) if as_json else table_of_tasks(shown))


@task.command()
@_task_argument
@namespace_option
@_json_option
def show(task_id: str, namespace: str, *, as_json: bool) -> None:
    """Show asynchronous task TASK. What was asked and answered is its owner's, and not shown."""
    from dynamo_local.cli.async_tasks.text import Listed, description_of_task, task_as_json

    store = _store(namespace)
    found = Listed.read(store, store.owner_of(task_id), task_id)
    if found is not None:
        click.echo(task_as_json(found) if as_json else description_of_task(found))


@task.command()
@_task_argument
@namespace_option
@_json_option
def cancel(task_id: str, namespace: str, *, as_json: bool) -> None:
    """Cancel asynchronous task TASK, which then has failed. One that has a result keeps it."""
    from dynamo_local.cli.async_tasks.text import Listed, task_as_json

    store = _store(namespace)
    owner = store.owner_of(task_id)
    store.cancel(owner, task_id)
    found = Listed.read(store, owner, task_id)
    if as_json and found is not None:
        click.echo(task_as_json(found))
    elif found is not None:
        ended = store.has_ended(owner, task_id)
        click.echo(f"{task_id} is {found.status}" if ended else f"{task_id} is being cancelled")


@task.command()
@click.argument("key", metavar="[KEY]", required=False, shell_complete=completion_values.keys)
@namespace_option
@_json_option
def secret(key: str | None, namespace: str, *, as_json: bool) -> None:
    """Show the secret that signs callbacks of the tasks of KEY; without KEY, of a server that needs no key.

    Each key has its own. It stays the same while the key is there, also when the key is rotated.
    """
    import json

    from dynamo_local.cli.async_tasks.owners import owner_of
    from dynamo_local.core.async_tasks.callbacks import secret_of, secret_text
    from state.async_tasks.secret import callback_secret

    paths = paths_of_store(namespace, "tasks")
    text = secret_text(secret_of(callback_secret(paths), owner_of(key, paths)))
    click.echo(json.dumps({"secret": text}) if as_json else text)


def _store(namespace: str) -> TaskStore:
    from state.async_tasks.store import TaskStore

    return TaskStore(paths_of_store(namespace, "tasks"))
