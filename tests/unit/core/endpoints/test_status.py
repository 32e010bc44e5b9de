"""States of endpoints with their reasons, and the devices that they need."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamo_local.core.endpoints.devices import check_devices, least_devices
from dynamo_local.core.endpoints.rollout.observed import Frontends, Ordered, Seen, Workers
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.endpoints.status import status_of, status_of_adapter
from dynamo_local.core.errors import DeviceError

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
