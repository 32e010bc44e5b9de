"""Which frontends serve a revision, and which of the server's do not yet, or are not heard."""

from __future__ import annotations

import pytest

from dynamo_local.core.fleet.view import FRONTEND_ROLE, ROUTER_ROLE, FleetView
from dynamo_local.core.messages.presence import Counts, Presence, ProcessState
from dynamo_local.supervisor.endpoints.revisions.observing import frontends_of


def presence(lease: str, state: ProcessState = "ready", role: str = FRONTEND_ROLE, held: int = 0) -> Presence:
    counts = Counts(in_flight=2 + held, held=held)
    return Presence(f"ns_Service_{lease}", "Service", role, lease, 1, state, counts=counts)


def view(*heard: Presence) -> FleetView:
    found = FleetView()
    for each in heard:
        found.observe(each, 0.0)
    return found


def test_requests_of_all_are_added_up() -> None:
    server = [presence("1"), presence("2"), presence("3", role=ROUTER_ROLE)]
    found = frontends_of(view(presence("1", held=1), presence("2")), server, 2)
    assert (found.ready, found.in_flight, found.held, found.missing, found.silent) == (2, 5, 1, 0, 0)
    assert found.are_ready
    assert found.are_heard


@pytest.mark.parametrize(
    ("in_revision", "server", "missing", "silent"),
    [
        ([presence("1")], [presence("1"), presence("2")], 1, 0),
        # It reads the board before it takes requests.
        ([presence("1")], [presence("1"), presence("2", "starting")], 0, 1),
        ([presence("1")], [presence("1")], 0, 1),
        ([], [presence("1"), presence("2")], 2, 0),
    ],
)
def test_one_that_has_not_announced_itself_is_known(
    in_revision: list[Presence], server: list[Presence], missing: int, silent: int
) -> None:
    found = frontends_of(view(*in_revision), server, 2)
    assert (found.missing, found.silent) == (missing, silent)
    assert not found.are_heard
    assert found.are_ready is (missing == 0)
