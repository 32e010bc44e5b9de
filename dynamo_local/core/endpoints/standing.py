"""What a frontend does for each revision on the board. Pure."""

from __future__ import annotations

from enum import Enum

from dynamo_local.core.messages.endpoints import Board, BoardRevision, EndpointStatus
from dynamo_local.core.names import parse_revision


class Standing(Enum):
    """What a frontend does for a revision."""

    PREPARES = "prepares"
    """The frontend builds its part of it, and gives it no request."""
    TAKES = "takes"
    """New requests go to the revision."""
    ENDS = "ends"
    """Requests under way finish, and no new ones come."""


def standings(board: Board, took: frozenset[str] = frozenset()) -> dict[str, Standing]:
    """Return the standing of each revision on the board.

    `took`: revisions that have taken requests before, as this frontend knows. One that takes none any more ends; so
    does one that a newer revision has taken over from, and that of an endpoint that is being deleted, for a frontend
    that was restarted meanwhile.
    """
    newest: dict[str, int] = {}
    for each in board.revisions:
        if each.takes_requests:
            revision = parse_revision(each.revision)
            newest[revision.endpoint] = max(newest.get(revision.endpoint, 0), revision.number)
    deleted = {view.spec.name for view in board.endpoints if view.status.state == "deleting"}
    return {each.revision: _standing(each, took, newest, deleted) for each in board.revisions}


def _standing(each: BoardRevision, took: frozenset[str], newest: dict[str, int], deleted: set[str]) -> Standing:
    if each.takes_requests:
        return Standing.TAKES
    revision = parse_revision(each.revision)
    over = each.revision in took or revision.endpoint in deleted
    return Standing.ENDS if over or revision.number < newest.get(revision.endpoint, 0) else Standing.PREPARES


def is_coming(status: EndpointStatus) -> bool:
    """Whether an endpoint that takes no requests now is to take some without its owner's order: as it is, or because
    somebody asks for it."""
    return status.state not in ("failed", "deleting")
