"""What a frontend does for each revision on the board, also if it was restarted meanwhile."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.endpoints.standing import Standing, standings
from dynamo_local.core.messages.endpoints import Board, BoardRevision, EndpointStatus, EndpointView

revisions = st.builds(
    lambda name, number, takes: BoardRevision(f"{name}@{number}", takes, (name,)),
    st.sampled_from("ab"),
    st.integers(1, 4),
    st.booleans(),
)
boards = st.lists(revisions, max_size=6, unique_by=lambda each: each.revision)
took = st.frozensets(st.sampled_from([f"{name}@{number}" for name in "ab" for number in range(1, 5)]))


@given(boards, took)
def test_each_revision_has_one_standing_and_those_that_take_requests_take_them(
    listed: list[BoardRevision], took: frozenset[str]
) -> None:
    found = standings(Board(1, tuple(listed)), took)
    assert set(found) == {each.revision for each in listed}
    assert {name for name, standing in found.items() if standing is Standing.TAKES} == {
        each.revision for each in listed if each.takes_requests
    }
    for name in took & set(found):
        assert found[name] is not Standing.PREPARES


def board(*listed: tuple[str, bool], deleting: str = "") -> Board:
    spec = EndpointSpec(name=deleting or "other", model="m")
    status = EndpointStatus("deleting" if deleting else "ready")
    return Board(
        1,
        tuple(BoardRevision(name, takes, (name,)) for name, takes in listed),
        (EndpointView(spec, status, 0.0, 0.0),),
    )


def test_an_update_prepares_then_takes_over_and_the_old_one_ends() -> None:
    assert standings(board(("a@1", True), ("a@2", False))) == {"a@1": Standing.TAKES, "a@2": Standing.PREPARES}
    flipped = board(("a@1", False), ("a@2", True))
    assert standings(flipped, frozenset({"a@1"})) == {"a@1": Standing.ENDS, "a@2": Standing.TAKES}
    # A frontend that has been restarted does not know what took requests.
    assert standings(flipped) == {"a@1": Standing.ENDS, "a@2": Standing.TAKES}


def test_what_is_deleted_ends_and_does_not_prepare() -> None:
    assert standings(board(("a@1", False), deleting="a")) == {"a@1": Standing.ENDS}
    assert standings(board(("a@1", False))) == {"a@1": Standing.PREPARES}


def test_endpoints_do_not_concern_each_other() -> None:
    assert standings(board(("a@1", False), ("b@2", True)))["a@1"] is Standing.PREPARES
