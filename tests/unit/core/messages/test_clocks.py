"""No message carries a moment of its sender's clock: each process has a clock of its own."""

from __future__ import annotations

import importlib
import pkgutil
import typing
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core import codec, messages
from dynamo_local.core.fleet.freeness import instance_of
from dynamo_local.core.fleet.rates import reading_of
from dynamo_local.core.fleet.view import Change, FleetView
from dynamo_local.core.messages.presence import EngineInfo, Load, Presence, as_received, as_sent
from dynamo_local.core.messages.routing import AssignRequest, Charge, Charged, Charges
from dynamo_local.core.migration.protocol import InFlightMigrations
from dynamo_local.core.migration.rebalancing import ThrashWatch
from dynamo_local.core.routing.ledger import Ledger
from dynamo_local.core.routing.policies import Freest, RoundRobin
from dynamo_local.supervisor.places import far, port
from dynamo_local.supervisor.server.launch import templates
from tests.unit.core.messages.messages_strategies import presences

OTHER_NUMBERS = {
    "EndpointHistory.last_at": "Unix time",
    "EndpointView.created_at": "Unix time",
    "EndpointView.updated_at": "Unix time",
    "Event.time": "Unix time",
    "DecisionReport.time": "Unix time",
    "DecisionReport.since": "Unix time",
    "Submit.arrival_time": "Unix time; decides only who waits for whom",
    "MigrationResult.gap_steps": "steps",
    "MigrationCounts.gap_steps": "steps",
    "HotBlock.heat": "a weight",
    "MetricSample.value": "whatever is measured",
    "Reserve.floor": "steps",
    "RoleReport.usage": "a share",
    "Need.share": "a share",
    "WatcherPlan.share": "a share",
    "ServiceTemplate.share": "a share",
    "PlannerReport.devices": "a number",
    "Load.kv_usage": "a share",
    "Load.kv_pinned": "a share",
    "WeighedWorker.cost": "by the policy: tokens, a number, or a duration",
    "EngineRates.prefill_s_per_token": "a rate",
    "EngineRates.step_s_per_running": "a rate",
    "Array.dtype": "a word",
    "TokenDelta.events": "ages",
    "PinAnswer.until": "a moment of the clock of a machine that the message names",
}
"""Fields with numbers that are no durations."""

OWN_CLOCK = {"Load.at", "Load.head_since", "Presence.started_at"}
"""Fields that are never sent."""


def fields() -> Iterator[tuple[str, str]]:
    """All fields of messages that can hold a fraction, with their types."""
    names = [f"{messages.__name__}.{found.name}" for found in pkgutil.iter_modules(messages.__path__)]
    for module in map(importlib.import_module, [*names, port.__name__, far.__name__, templates.__name__]):
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__:
                for name, hint in typing.get_type_hints(kind, include_extras=True).items():
                    if "float" in str(hint):
                        yield f"{kind.__name__}.{name}", str(hint)


def test_each_number_in_a_message_is_a_duration_or_is_known_to_be_no_moment() -> None:
    found = dict(fields())
    durations = {name for name, hint in found.items() if name.endswith("_s") and "process's clock" not in hint}
    own = {name for name, hint in found.items() if "process's clock" in hint}
    assert own == OWN_CLOCK
    assert found.keys() - durations - own == OTHER_NUMBERS.keys()


@given(presences)
def test_no_presence_is_sent_with_a_moment(presence: Presence) -> None:
    sent = as_sent(presence, 5.0, 4.0)
    moments = (sent.started_at, None if sent.load is None else (sent.load.at, sent.load.head_since))
    assert moments in ((None, None), (None, (None, None)))


@given(presences)
def test_no_moment_that_a_presence_comes_with_is_believed(presence: Presence) -> None:
    received = as_received(presence, 100.0)
    for moment in (received.started_at, *((received.load.at, received.load.head_since) if received.load else ())):
        assert moment is None or moment <= 100.0


# Each process with a clock of its own. Times are multiples of 1/64 s and offsets whole, so that sums are exact.

WORKERS = ("a", "b", "c")
TRANSIT_S = 1 / 64
ENGINE = EngineInfo("e", "m", 4096, 16, 64, 8)


@dataclass(frozen=True)
class Clocks:
    """By process, how far its clock is ahead of the true time."""

    offsets: dict[str, int]

    def of(self, process: str, time: float) -> float:
        return time + self.offsets.get(process, 0)


clocks = st.builds(
    Clocks, st.fixed_dictionaries({who: st.integers(-(10**6), 10**6) for who in (*WORKERS, "f", "router", "other")})
)
loads = st.builds(
    Load,
    running=st.integers(0, 9),
    waiting=st.integers(0, 9),
    kv_usage=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    head_tokens=st.integers(0, 99),
    preempted_tokens=st.integers(0, 3),
    recomputed_tokens=st.integers(0, 3),
)
beats = st.lists(st.tuples(st.sampled_from(WORKERS), loads, st.integers(0, 1200), st.integers(0, 200)), max_size=12)
"""Worker, load, its age and how long after the last one it is sent, both in 1/64 s."""

Seen = list[object]


def announced(clocks: Clocks, told: list[tuple[str, Load, int, int]]) -> tuple[FleetView, Seen, float]:
    """What a frontend makes of presences, by its own clock. Returns the true time at the end."""
    seen: Seen = []
    view, thrash, flights = FleetView(), ThrashWatch(), InFlightMigrations()
    time = 1000.0
    for number, (worker, load, age, later) in enumerate(told):
        time += later / 64
        sender = clocks.of(worker, time)
        load = msgspec.structs.replace(load, at=sender - age / 64, head_since=sender - 2 * age / 64)
        own = Presence(f"ns_{worker}", "W", "decode", worker, 1, "ready", engine=ENGINE, load=load)
        data = codec.encode(as_sent(own, sender, sender))
        now = clocks.of("f", time + TRANSIT_S)
        presence = as_received(codec.decode(data, Presence), now)
        changes: list[Change] = view.observe(presence, now)
        if number % 3 == 0:
            flights.end(flights.begin("a", "b", 10, now), now, moved=True)
        reading, instance = reading_of(presence.load, now), instance_of(presence, now)
        seen.append((reading, flights.change(presence), instance, sorted(thrash.look(view.members(), now))))
        changes += view.expire(now)
        seen.append([(change.what, change.presence.lease) for change in changes])
    return view, seen, time


@given(clocks, beats)
def test_a_fleet_looks_the_same_by_any_clocks(clocks: Clocks, told: list[tuple[str, Load, int, int]]) -> None:
    assert announced(clocks, told)[1] == announced(Clocks({}), told)[1]


orders = st.lists(
    st.tuples(st.sampled_from(["assign", "assign", "release", "report"]), st.integers(0, 5), st.integers(1, 90)),
    max_size=15,
)


@pytest.mark.parametrize("policy", [Freest(), RoundRobin()], ids=["freest", "round robin"])
@given(clocks=clocks, told=beats, orders=orders)
def test_requests_are_assigned_the_same_by_any_clocks(
    policy: Freest | RoundRobin,
    clocks: Clocks,
    told: list[tuple[str, Load, int, int]],
    orders: list[tuple[str, int, int]],
) -> None:
    assert _assigned(policy, clocks, told, orders) == _assigned(policy, Clocks({}), told, orders)


def _assigned(
    policy: Freest | RoundRobin,
    clocks: Clocks,
    told: list[tuple[str, Load, int, int]],
    orders: list[tuple[str, int, int]],
) -> list[object]:
    """A router assigns; the frontend keeps an account; another router hears of all from the frontend."""
    view, _, time = announced(Clocks(clocks.offsets | {"f": clocks.offsets.get("router", 0)}), told)
    ledgers = {who: Ledger() for who in ("router", "f", "other")}
    found: list[object] = []
    for what, number, tokens in orders:
        time += tokens / 64
        now = {who: clocks.of(who, time) for who in ledgers}
        request = AssignRequest(str(number), "f", tokens)
        if what == "assign":
            choice = policy.choose(request, view.routable(), ledgers["router"], now["router"])
            if choice is None:
                continue
            order = ledgers["router"].charge("f", str(number), choice.worker, tokens, now["router"])
            charge = Charge(str(number), choice.worker, tokens, order=order)
            ledgers["f"].take_over("f", charge, now["f"])
            heard = codec.decode(codec.encode(Charged("f", charge)), Charged)
            for who in ("router", "other"):
                ledgers[who].take_over("f", heard.charge, now[who])
            found.append(choice)
        elif what == "release":
            for ledger in ledgers.values():
                ledger.release("f", str(number))
        else:
            report = codec.decode(codec.encode(Charges("f", ledgers["f"].of_frontend("f", now["f"]))), Charges)
            restarted = Ledger()
            restarted.settle("f", report.charges, now["other"] - 3, now["other"])
            ledgers["other"].settle("f", report.charges, now["other"] - 3, now["other"])
            found += [(restarted.since(each, now["other"] - 1), ledgers["other"].requests(each)) for each in WORKERS]
    return [*found, *(ledger.last_assigned(each) for ledger in ledgers.values() for each in WORKERS)]
