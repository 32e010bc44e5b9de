"""The models that the processes of a server work for: the graph's own, and one for each revision of an endpoint.

Each has subjects of its own, so whoever asks frontends or queues asks once for each of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from dynamo_local.core.errors import UsageError
from dynamo_local.core.messages.endpoints import Board
from dynamo_local.core.names import endpoint_of, parse_revision

OWN = ""
"""Stands for the graph's own model where the text of a revision is expected."""


def known_revisions(used: Iterable[str], board: Board | None, endpoint: str | None = None) -> list[str]:
    """Return the revisions that exist, in order, after `OWN`; only those of `endpoint` if it is given. Pure.

    `used`: those that processes belong to, in any order; the board may have others, whose processes are still to come.
    Raises UsageError, which lists the endpoints, if there is no such endpoint.
    """
    listed = () if board is None else (each.revision for each in board.revisions)
    found = sorted({*used, *listed} - {OWN}, key=parse_revision)
    if endpoint is None:
        return [OWN, *found]
    names = endpoint_names(found, board)
    if endpoint not in names:
        raise UsageError(f"there is no endpoint {endpoint!r}", f"there are: {', '.join(names) or 'none'}")
    return [revision for revision in found if endpoint_of(revision) == endpoint]


def endpoint_names(revisions: Iterable[str], board: Board | None) -> list[str]:
    """Return the names of the endpoints that are on the board or have revisions, sorted. Pure."""
    ordered = () if board is None else (view.spec.name for view in board.endpoints)
    return sorted({*map(endpoint_of, revisions), *ordered} - {OWN})


def shown_model(revision: str) -> str:
    """What a revision serves, in words."""
    return revision or "the server's own model"
