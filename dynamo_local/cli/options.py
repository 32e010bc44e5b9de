"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dynamo_local.core.names import DEFAULT_NAMESPACE, NAMESPACE_ENV

if TYPE_CHECKING:
    from state.paths import StatePaths

_F = TypeVar("_F", bound=Callable[..., Any])

JSON_HELP = "Print the result as JSON."


def namespace_option(function: _F) -> _F:
    """Add the option --namespace, which selects a running server."""
    return click.option(
        "--namespace",
        envvar=NAMESPACE_ENV,
        show_envvar=True,
        default=DEFAULT_NAMESPACE,
        show_default=True,
        help="Namespace of the server. It tells the servers of one machine apart.",
    )(function)


def paths_of(namespace: str) -> StatePaths:
    """Return the paths of the files of the namespace's server. Raises ConfigError for an invalid namespace."""
    import os

    from state.paths import StatePaths

    return StatePaths.of(namespace, os.environ)
