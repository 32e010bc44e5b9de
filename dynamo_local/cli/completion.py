"""`dynamo completion`, and values that the shell completes: namespaces, watchers, services, settings, requests, models.

Each function of values is a `shell_complete` of click. What cannot be found out is left out without a word, since a
message would be printed into the line that the user is typing. Imports stand in the functions: this module is imported
by commands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from dynamo_local.core.errors import DynamoError

if TYPE_CHECKING:
    from state.paths import StatePaths
    from state.statefile.model import Component

# The name that click derives from the program's: set by the script when the shell asks for completions. click answers
# then, in place of the command.
ASKED_BY = "_DYNAMO_COMPLETE"

_Values = Callable[[click.Context, str], Iterable[str]]
_Complete = Callable[[click.Context, click.Parameter, str], list[str]]
_REQUESTS_WITHIN_S = 1.0
_MOST_REQUESTS = 50
_GRAPHS = "examples.llm.graphs"
_ROOT_SERVICE = "Frontend"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that makes SHELL complete `dynamo`.

    \b
    bash   echo 'eval "$(dynamo completion bash)"' >> ~/.bashrc
    zsh    echo 'eval "$(dynamo completion zsh)"' >> ~/.zshrc     (after compinit)
    fish   dynamo completion fish > ~/.config/fish/completions/dynamo.fish

    Commands, options, files, namespaces, watchers, services, live settings, requests and models are completed. It holds
    for shells that are started afterwards. bash has to be 4.4 or newer.

    \b
    dynamo completion bash
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "click knows the shells of the choice"
    # Not `source`, which for bash starts a shell to look at its version.
    script = kind(context.find_root().command, {}, "dynamo", ASKED_BY)
    click.echo(script.source_template % script.source_vars())


def _quiet(values: _Values) -> _Complete:
    """Make a `shell_complete` of a function that lists values, some of which may not fit what was typed."""

    @functools.wraps(values)
    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
        found: list[str] = []
        with suppress(DynamoError, OSError, ValueError, TimeoutError):
            found = [value for value in values(context, incomplete) if value.startswith(incomplete)]
        return list(dict.fromkeys(found))

    return complete


@_quiet
def namespaces(context: click.Context, incomplete: str) -> Iterable[str]:
    """Namespaces of servers that run or have crashed."""
    from dynamo_local.cli.options import state_folder
    from state.namespaces import find_servers

    found = find_servers(state_folder())
    return (*found.running, *found.crashed)


@_quiet
def watchers(context: click.Context, incomplete: str) -> Iterable[str]:
    """Watchers of services; short names, or full ones if a full one was begun."""
    return _names([component.watcher_name for component in _services(context)], incomplete)


@_quiet
def workers(context: click.Context, incomplete: str) -> Iterable[str]:
    """Watchers of workers."""
    return _names([component.watcher_name for component in _workers(context)], incomplete)


@_quiet
def endpoints_and_watchers(context: click.Context, incomplete: str) -> Iterable[str]:
    """Endpoints, then the watchers of services."""
    names = _names([component.watcher_name for component in _services(context)], incomplete)
    return [*_endpoints(_paths(context)), *names]


@_quiet
def services_and_watchers(context: click.Context, incomplete: str) -> Iterable[str]:
    """Services and endpoints, then their watchers."""
    found = _services(context)
    names = _names([component.watcher_name for component in found], incomplete)
    return [*dict.fromkeys(map(_group, found)), *names]


@_quiet
def logs(context: click.Context, incomplete: str) -> Iterable[str]:
    """Endpoints, and services, watchers and programs that have logs."""
    from dynamo_local.core.names import short_watcher

    names = sorted(path.stem for path in _paths(context).logs_dir.glob("*.log"))
    return [*_endpoints(_paths(context)), *map(short_watcher, names), *names]


@_quiet
def endpoints(context: click.Context, incomplete: str) -> Iterable[str]:
    """Names of endpoints. Nothing once one has been given."""
    from dynamo_local.cli.options import ONLY_SERVER, paths_of_kept

    if any(not word.startswith("-") for word in context.params.get("words") or ()):
        return []
    return _endpoints(paths_of_kept(context.params.get("namespace") or ONLY_SERVER, "endpoints"))


@_quiet
def keys(context: click.Context, incomplete: str) -> Iterable[str]:
    """Names of API keys."""
    from dynamo_local.cli.options import ONLY_SERVER, paths_of_kept
    from state.keys import read_key_registry

    return list(read_key_registry(paths_of_kept(context.params.get("namespace") or ONLY_SERVER, "keys")).keys)


@_quiet
def nothing(context: click.Context, incomplete: str) -> Iterable[str]:
    """Nothing: the word is a new name."""
    return ()


@_quiet
def worker_numbers(context: click.Context, incomplete: str) -> Iterable[str]:
    """SERVICE=NUMBER or ENDPOINT=NUMBER with each other number of workers up to one more than there are."""
    numbers: dict[str, int] = {}
    for component in _workers(context):
        numbers[_group(component)] = numbers.get(_group(component), 0) + component.holds
    return [f"{service}={number}" for service, now in numbers.items() for number in range(1, now + 2) if number != now]


@_quiet
def settings(context: click.Context, incomplete: str) -> Iterable[str]:
    """Names of live settings."""
    from dynamo_local.core.live_settings import SETTINGS

    return sorted(SETTINGS)


@_quiet
def requests(context: click.Context, incomplete: str) -> Iterable[str]:
    """Ids of the requests in flight. Only the frontends know them."""
    from dynamo_local.control.client import ControlClient
    from dynamo_local.control.operations import LIST_REQUESTS

    query = {"limit": str(_MOST_REQUESTS)}
    answer = ControlClient(_paths(context)).do(LIST_REQUESTS, query=query, timeout_s=_REQUESTS_WITHIN_S)
    return [line["request"] for line in answer["requests"]]


@_quiet
def models(context: click.Context, incomplete: str) -> Iterable[str]:
    """Models that servers serve, the named ones, and those in the cache of the Hugging Face Hub."""
    return [*_served(), *_servable()]


@_quiet
def targets(context: click.Context, incomplete: str) -> Iterable[str]:
    """What `dynamo serve` takes: models and the example graphs. Nothing once one has been given."""
    if any(not argument.startswith("-") for argument in context.params.get("arguments") or ()):
        return []
    return [*_servable(), *_graphs()]


def _paths(context: click.Context) -> StatePaths:
    from dynamo_local.cli.options import ONLY_SERVER, paths_of

    return paths_of(context.params.get("namespace") or ONLY_SERVER)


def _services(context: click.Context) -> list[Component]:
    from dynamo_local.core.names import MACHINERY
    from state.statefile.store import StateStore

    # The file itself: a read that waits for a repair would hold up the shell.
    found = StateStore(_paths(context)).read_file().components.values()
    return [component for component in found if component.component not in MACHINERY]


def _group(component: Component) -> str:
    """The endpoint that a process works for, or else its service."""
    from dynamo_local.core.names import endpoint_of

    return endpoint_of(component.watcher.revision) or component.component


def _endpoints(paths: StatePaths) -> list[str]:
    from state.endpoints.registry import read_registry

    # The registry itself, which also has those of a server that does not run: to ask a server would take too long.
    return list(read_registry(paths).entries)


def _workers(context: click.Context) -> list[Component]:
    from dynamo_local.core.fleet.view import ENGINE_ROLES

    return [component for component in _services(context) if component.role in ENGINE_ROLES]


def _names(full: Iterable[str], incomplete: str) -> list[str]:
    from dynamo_local.core.names import short_watcher

    known = list(full)
    short = list(map(short_watcher, known))
    return short if not incomplete or any(name.startswith(incomplete) for name in short) else known


def _served() -> list[str]:
    from dynamo_local.cli.options import state_folder
    from dynamo_local.supervisor.admin.servers import served_models
    from state.endpoints.board import read_board
    from state.namespaces import find_servers
    from state.paths import StatePaths
    from state.record import read_record

    # By their files, which are there at once. To ask the servers would take too long.
    servers = [StatePaths(state_folder(), name) for name in find_servers(state_folder()).running]
    return [model for paths in servers for model in served_models(read_record(paths), read_board(paths))]


def _servable() -> list[str]:
    import os

    from dynamo_local.doctor.network import cache_folder
    from dynamo_local.model.named.names import NAMES

    folders = sorted(path.name for path in cache_folder(os.environ).glob("models--*"))
    return [*NAMES, *(name.removeprefix("models--").replace("--", "/") for name in folders)]


def _graphs() -> list[str]:
    from importlib.util import find_spec
    from pathlib import Path

    spec = find_spec(_GRAPHS)
    folders = spec.submodule_search_locations if spec is not None else None
    modules = sorted(path.stem for folder in folders or () for path in Path(folder).glob("[a-z]*.py"))
    return [f"{_GRAPHS}.{module}:{_ROOT_SERVICE}" for module in modules]
