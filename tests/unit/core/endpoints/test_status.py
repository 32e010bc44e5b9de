"""States of endpoints with their reasons, and the devices that they need."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.endpoints.checks import check_devices, least_devices
from dynamo_local.core.endpoints.rollout import Frontends, Ordered, Seen, Workers
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.endpoints.status import Standing, noted, standings, status_of, status_of_adapter
from dynamo_local.core.errors import DeviceError
from dynamo_local.core.messages.endpoints import Board, BoardRevision, EndpointHistory, EndpointStatus, EndpointView
from dynamo_local.core.messages.reports import Event

# What a frontend does for each revision on the board, also if it was restarted meanwhile.

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


# What has become of an endpoint, counted by its events.


def history_of(*events: Event) -> EndpointHistory:
    history = EndpointHistory()
    for event in events:
        history = noted(history, event)
    return history


def test_each_change_counts_once_by_its_cause() -> None:
    found = history_of(
        Event("sleep", "asleep", "nobody has asked for it yet", cause="start", time=1.0),
        Event("endpoint", "created: model m", time=2.0),
        Event("wake", "woken by a request", "it was asleep", cause="request", time=3.0),
        Event("wake", "awake after 0.50 s", cause="request", took_s=0.5, time=3.5),
        Event("park", "parked", "no request for 60 s", cause="idle", time=70.0),
        Event("wake", "woken by order", "it was parked", cause="order", time=80.0),
        Event("swap", "yields its device to code", "asked for 1 s ago", to="code", time=90.0),
        Event("sleep", "asleep", "its device was given to code", cause="swap", time=91.0),
        Event("swap", "gave its device to code within 2.00 s", to="code", took_s=2.0, time=92.0),
    )
    assert found.sleeps == {"swap": 1}
    assert found.wakes == {"request": 1, "order": 1}
    assert found.parks == {"idle": 1}
    assert found.swaps == 1
    assert (found.last, found.last_at) == ("gave its device to code within 2.00 s", 92.0)


def test_a_swap_that_is_only_decided_does_not_count() -> None:
    found = history_of(Event("swap", "yields its device to code", "asked for 1 s ago", to="code", time=9.0))
    assert (found.swaps, found.last) == (0, "yields its device to code: asked for 1 s ago")


ANSWERING = Seen(launched=True, workers=Workers(("w1",)), frontends=Frontends(ready=1), took_requests=True)

PARKED = replace(ANSWERING, workers=Workers(parked=("w1",)))
ASLEEP = replace(ANSWERING, workers=Workers())


def served_by(frontends: Frontends) -> Seen:
    return Seen(launched=True, workers=Workers(("w1",)), frontends=frontends, took_requests=True)


@pytest.mark.parametrize(
    ("ordered", "seen", "takes", "state", "reason"),
    [
        (Ordered(1), {1: Seen()}, None, "fetching", "its model is looked up"),
        (Ordered(1), {1: Seen(under_way="launching", doing="m: 3 of 9 MB (33 %)")}, None, "fetching", "33 %"),
        (Ordered(1), {1: Seen(launched=True, shortage="no CPU slot is free")}, None, "waiting", "no CPU slot is free"),
        (Ordered(1), {1: Seen(is_hopeless=True, error="no folder")}, None, "failed", "no folder"),
        (Ordered(1), {1: Seen(failures=1, error="killed")}, None, "starting", "tried again after: killed"),
        (Ordered(1), {1: ANSWERING}, 1, "ready", ""),
        (Ordered(1), {1: Seen(launched=True, took_requests=True)}, 1, "starting", "no worker is ready any more"),
        (Ordered(1), {1: served_by(Frontends())}, 1, "starting", "no frontend is ready"),
        (Ordered(1), {1: served_by(Frontends(starting=1))}, 1, "starting", "no frontend is ready"),
        (Ordered(1), {1: served_by(Frontends(failure="no folder"))}, 1, "failed", "no folder"),
        (Ordered(2, 1), {1: ANSWERING, 2: Seen()}, 1, "updating", "revision 2: its model is looked up"),
        (Ordered(2, 1), {1: ANSWERING, 2: Seen(launched=True)}, 1, "updating", "revision 2: its workers start"),
        (Ordered(2), {1: ANSWERING, 2: ANSWERING}, 2, "updating", "requests under way"),
        (Ordered(1, rest="parked", why="no request"), {1: PARKED}, 1, "parked", "no request"),
        (Ordered(1, rest="parked", why="no request"), {1: ANSWERING}, 1, "ready", "about to be parked"),
        (Ordered(1, workers=0, rest="asleep", why="no request"), {1: ASLEEP}, 1, "asleep", "no request"),
        (Ordered(1, workers=0, rest="asleep", why="no request"), {1: ASLEEP}, None, "asleep", "no request"),
        (
            Ordered(1, workers=0, rest="asleep"),
            {1: Seen(is_hopeless=True, error="no folder")},
            None,
            "failed",
            "no folder",
        ),
        (Ordered(1, workers=0, rest="asleep", wake_failed="no memory"), {1: ASLEEP}, 1, "failed", "no memory"),
        (Ordered(1, waking=True), {1: ASLEEP}, 1, "waking", "its workers start"),
        (Ordered(1, waking=True), {1: replace(ASLEEP, shortage="no CPU slot is free")}, 1, "waiting", "no CPU slot"),
        (Ordered(1), {1: replace(PARKED, frontends=Frontends(ready=1, held=2))}, 1, "waking", "2 requests wait"),
        (Ordered(1, why="to be parked once"), {1: ANSWERING}, 1, "ready", "to be parked once"),
        (Ordered(1, deleting=True), {1: ANSWERING}, None, "deleting", "requests under way"),
    ],
)
def test_a_state_has_its_reason(
    ordered: Ordered, seen: dict[int, Seen], takes: int | None, state: str, reason: str
) -> None:
    status = status_of(ordered, seen, takes)
    assert (status.state, reason in status.reason) == (state, True), status


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [((1, 0), "1 request under way"), ((2, None), "at least 2 requests under way"), ((None, 0), "requests under way")],
)
def test_requests_that_are_not_counted_are_not_taken_for_none(numbers: tuple[int | None, ...], reason: str) -> None:
    seen = {
        number: Seen(launched=True, workers=Workers(("w",)), frontends=Frontends(draining=1, in_flight=count))
        for number, count in enumerate(numbers, 1)
    }
    assert status_of(Ordered(1, deleting=True), seen, None).reason == reason


def test_what_went_wrong_last_is_said_while_nothing_else_is() -> None:
    assert status_of(Ordered(1), {1: ANSWERING}, 1, "the update failed").reason == "the update failed"


def test_an_adapter_is_what_its_base_is() -> None:
    ready = status_of(Ordered(1), {1: ANSWERING}, 1)
    assert status_of_adapter("base", ready).state == "ready"
    assert status_of_adapter("base", status_of(Ordered(1), {1: Seen()}, None)).state == "waiting"
    assert status_of_adapter("base", None).state == "failed"
    asleep = status_of_adapter("base", status_of(Ordered(1, workers=0, rest="asleep"), {1: ASLEEP}, 1))
    assert (asleep.state, asleep.reason) == ("asleep", "served by base, which is asleep: a request wakes it")
    lacks = "its workers were started without room for adapters"
    rolled = status_of_adapter("base", status_of(Ordered(2, 1), {1: ANSWERING, 2: Seen()}, 1), lacks=lacks, comes=True)
    assert (rolled.state, rolled.reason) == (
        "starting",
        f"base is rolled: {lacks}; revision 2: its model is looked up",
    )
    reverted = status_of(Ordered(1), {1: ANSWERING}, 1, "the update to revision 2 failed")
    failed = status_of_adapter("base", reverted, lacks=lacks)
    assert (failed.state, lacks in failed.reason, "revision 2 failed" in failed.reason) == ("failed", True, True)
    gone = status_of_adapter("base", ready, wrong="adapter fr: /fr does not exist")
    assert (gone.state, gone.reason) == ("failed", "adapter fr: /fr does not exist")


def spec(name: str, **fields: object) -> EndpointSpec:
    return EndpointSpec(name=name, model="m", **fields)  # type: ignore[arg-type]


def test_devices_are_those_of_the_least_workers() -> None:
    assert least_devices(spec("a", min_workers=3, gpu=0.5)) == 1.5
    assert least_devices(spec("a", min_workers=2, args={"tensor-parallel-size": 2})) == 4
    assert least_devices(spec("a", disaggregated=True, min_prefill_workers=2)) == 3
    assert least_devices(spec("a", adapter_of="b")) == 0


def test_too_few_devices_are_refused_with_figures() -> None:
    with pytest.raises(DeviceError, match=r"needs 5 GPUs .* there are 4"):
        check_devices(spec("big", min_workers=5), (), 4, "GPUs")
    with pytest.raises(DeviceError, match=r"needs 2 GPUs .* of 4 the others need 3 \(one 1, two 2\)"):
        check_devices(spec("more", gpu=2), [spec("one"), spec("two", min_workers=2)], 4, "GPUs")
    check_devices(spec("fits"), [spec("one"), spec("two", min_workers=2)], 4, "GPUs")
