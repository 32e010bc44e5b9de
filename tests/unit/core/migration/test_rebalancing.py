"""Rebalancing: who gives what to whom, and that it comes to an end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.fleet.freeness import Usage, measured
from dynamo_local.core.messages.presence import EngineInfo, Load, Presence
from dynamo_local.core.migration.rebalancing import (
    Candidate,
    PlannedMigration,
    RebalancingLimits,
    WorkerRoom,
    plan,
    room_of,
)
from dynamo_local.core.priority.classes import PriorityClass

KV = 1000
LIMITS = RebalancingLimits(below=50, above=200)


def room(lease: str, used: int, running: int, *, head: int = 0, slots: int = 8, urgent: int = 0) -> WorkerRoom:
    return WorkerRoom(lease, measured(KV, used / KV, running, head, urgent=urgent), slots)


def candidates(worker: str, *tokens: int, priority: int = 0) -> list[Candidate]:
    return [Candidate(f"{worker}{size}", worker, size, priority) for size in tokens]


def names(transfers: tuple[PlannedMigration, ...]) -> list[str]:
    return [f"{transfer.request_id}>{transfer.destination}" for transfer in transfers]


ONLY_ROOM = RebalancingLimits(below=-1e9, above=1e9)


# Relieving


def test_the_least_free_gives_its_shortest_to_the_freest_until_it_is_in_its_range() -> None:
    # 100 tokens are left for 4 requests: 25 steps. Then (100 + 150) / 3.
    rooms = [room("full", 900, 4), room("free", 100, 1), room("freer", 0, 0)]
    transfers = plan(rooms, candidates("full", 300, 150, 200, 250), LIMITS)
    assert names(transfers) == ["full150>freer"]
    assert (transfers[0].reason, transfers[0].floor) == ("rebalance", 50)


def test_it_gives_more_than_one_if_one_is_not_enough() -> None:
    rooms = [room("full", 990, 11), room("free", 0, 0)]
    asked = candidates("full", *range(85, 96))
    assert names(plan(rooms, asked, LIMITS)) == ["full85>free", "full86>free", "full87>free", "full88>free"]
    assert names(plan(rooms, asked, RebalancingLimits(below=50, above=200, at_once=2))) == [
        "full85>free",
        "full86>free",
    ]


def test_it_ends_when_the_freest_is_not_free_any_more() -> None:
    rooms = [room("full", 990, 11), room("free", 600, 1)]
    # 400 steps, then (400 - 85) / 2.
    assert names(plan(rooms, candidates("full", *range(85, 96)), LIMITS)) == ["full85>free"]


def test_what_is_less_urgent_goes_first() -> None:
    rooms = [room("full", 900, 3), room("free", 0, 0)]
    asked = candidates("full", 100) + candidates("full", 400, priority=1)
    assert names(plan(rooms, asked, LIMITS)) == ["full400>free"]


def test_what_is_urgent_stays_while_others_run_there() -> None:
    free = room("free", 0, 0)
    asked = candidates("full", 100, priority=-1)
    assert plan([room("full", 900, 3), free], asked, LIMITS) == ()
    assert plan([room("full", 900, 3, urgent=2), free], asked, LIMITS) == ()
    assert names(plan([room("full", 900, 3, urgent=3), free], asked, LIMITS)) == ["full100>free"]


@pytest.mark.parametrize(("head", "moved"), [("high", ["a100>b"]), ("normal", ["a400>b"]), ("background", [])])
def test_nobody_makes_way_for_a_lower_class(head: str, moved: list[str]) -> None:
    blocked = replace(room("a", 800, 3, head=300, urgent=1), head=PriorityClass(head))
    asked = candidates("a", 100, priority=-1) + candidates("a", 400)
    if head == "high":
        asked = asked[:1]
    assert names(plan([blocked, room("b", 100, 1)], asked, RebalancingLimits(below=-1e9, above=1e9))) == moved


def test_no_worker_is_made_full_for_another() -> None:
    # (300 - 260) / 2 would be 20 steps.
    assert plan([room("full", 900, 3), room("free", 700, 1)], candidates("full", 260, 300), LIMITS) == ()


@pytest.mark.parametrize(
    "rooms",
    [
        [room("full", 900, 2), room("free", 0, 0)],
        [room("full", 900, 4), room("other", 810, 1)],
        [room("full", 900, 4), room("free", 0, 0, slots=0)],
        [room("full", 900, 4)],
    ],
)
def test_in_the_range_and_where_nobody_can_take_nothing_moves(rooms: list[WorkerRoom]) -> None:
    assert plan(rooms, candidates("full", 100), LIMITS) == ()


def test_of_a_worker_without_anything_to_give_the_next_one_gives() -> None:
    rooms = [room("fuller", 950, 4), room("full", 900, 4), room("free", 0, 0)]
    assert names(plan(rooms, candidates("full", 100, 200), LIMITS)) == ["full100>free"]


# Making room


def test_others_make_way_for_a_request_that_fits_nowhere() -> None:
    """300 tokens are needed; there are 200, 200 and 150."""
    rooms = [room("a", 800, 3, head=300), room("b", 800, 1), room("c", 850, 1)]
    transfers = plan(rooms, candidates("a", 90, 400), LIMITS)
    # With 90 tokens more, b is left with 110 for 2.
    assert transfers == ()
    transfers = plan(rooms, candidates("a", 100, 400), LIMITS)
    assert [(t.request_id, t.destination, t.reason) for t in transfers] == [("a100", "b", "room")]


def test_several_make_way_together_or_none() -> None:
    rooms = [room("a", 900, 4, head=280), room("b", 800, 1), room("c", 800, 1)]
    assert names(plan(rooms, candidates("a", 90, 95, 500), LIMITS)) == ["a90>c", "a95>b"]
    assert plan(rooms, candidates("a", 85, 90, 500), LIMITS) == ()


def test_a_full_batch_is_made_room_in_too() -> None:
    blocked = room("a", 400, 8, head=50, slots=0)
    transfers = plan([blocked, room("b", 100, 1)], candidates("a", 50), LIMITS)
    assert [(t.request_id, t.reason) for t in transfers] == [("a50", "room")]
    # 50 tokens less for the first of the queue, 550 for 8 requests.
    assert transfers[0].floor == 550 / 8
    assert plan([blocked, room("b", 500, 8)], candidates("a", 50), LIMITS) == ()


def test_others_make_way_for_one_that_lost_its_slot_and_not_for_one_that_lost_its_blocks() -> None:
    # It finds blocks: 600 are free.
    blocked = replace(room("a", 400, 8, head=50, slots=0), preempted_tokens=50)
    assert names(plan([blocked, room("b", 100, 1)], candidates("a", 50), LIMITS)) == ["a50>b"]
    for slots in (0, 1):
        blocked = replace(room("a", 800, 3, head=300, slots=slots), preempted_tokens=300)
        assert plan([blocked, room("b", 100, 1)], candidates("a", 400), ONLY_ROOM) == ()


def test_nobody_gives_way_to_one_that_fits() -> None:
    assert plan([room("a", 600, 2, head=300), room("b", 0, 0)], candidates("a", 100), LIMITS) == ()


def test_a_worker_with_a_queue_of_its_own_takes_nothing() -> None:
    rooms = [room("a", 800, 3, head=300), room("b", 750, 1, head=100)]
    assert plan(rooms, candidates("a", 100), LIMITS) == ()
    assert len(plan([rooms[0], room("b", 750, 1)], candidates("a", 100), LIMITS)) == 1


# Ending the thrashing


def spiral(lease: str, used: int, running: int, *, preempted: int) -> WorkerRoom:
    """A worker that thrashes, and whose contexts of that many tokens wait to be computed again."""
    full = room(lease, used, running, head=preempted)
    return replace(full, preempted_tokens=preempted, thrashing=True)


def of_length(worker: str, *tokens: int, generated: int = 0) -> list[Candidate]:
    return [Candidate(f"{worker}{size}", worker, size, 0, generated) for size in tokens]


ONLY_THRASHING = RebalancingLimits(below=0, above=1e9)


def test_as_few_leave_a_worker_that_thrashes_as_give_the_others_room_to_grow() -> None:
    # 150 wait, 2 are to grow by 100, and 50 are free: 300 are lacking. When one has left, 100 fewer.
    rooms = [spiral("hot", 950, 2, preempted=150), room("free", 0, 0)]
    assert names(plan(rooms, of_length("hot", 150, 320, 480), ONLY_THRASHING)) == ["hot320>free"]
    assert plan(rooms, of_length("hot", 320), ONLY_THRASHING)[0].reason == "thrash"


def test_if_no_single_one_is_enough_the_longest_go_first() -> None:
    rooms = [spiral("hot", 960, 6, preempted=160), room("b", 0, 0), room("c", 0, 0)]
    moved = names(plan(rooms, of_length("hot", 100, 140, 160, 180, 180 + 10), ONLY_THRASHING))
    assert moved[:2] == ["hot190>c", "hot180>b"]
    assert len(moved) == 3


def test_what_comes_must_have_room_to_become_twice_as_long_as_it_is() -> None:
    rooms = [spiral("hot", 950, 2, preempted=50), room("free", 400, 1)]
    assert plan(rooms, of_length("hot", 300, generated=301), ONLY_THRASHING) == ()
    assert names(plan(rooms, of_length("hot", 300, generated=300), ONLY_THRASHING)) == ["hot300>free"]


def test_where_all_are_nearly_full_nothing_moves() -> None:
    rooms = [spiral("hot", 950, 2, preempted=300), room("a", 850, 1), spiral("b", 800, 1, preempted=100)]
    assert plan(rooms, of_length("hot", 100, 200), ONLY_THRASHING) == ()


def test_a_worker_that_preempts_now_and_then_keeps_its_requests() -> None:
    rooms = [replace(spiral("hot", 950, 2, preempted=40), thrashing=False), room("free", 0, 0)]
    assert plan(rooms, of_length("hot", 100, 200), ONLY_THRASHING) == ()


# What is known


def presence(load: Load | None, no_transfer: str | None = None) -> Presence:
    engine = EngineInfo("e", "m", 1000, 10, 100, 8, no_transfer)
    return Presence("w", "W", "aggregated", "w", 1, "ready", engine=engine, load=load)


KNOWN = Load(3, 0, 0.5, at=1.0, head_tokens=0)


def test_a_worker_takes_part_with_what_migrations_change() -> None:
    found = room_of(presence(KNOWN), 1.0, Usage(-100, requests=-1))
    assert found is not None
    assert (found.freeness, found.slots) == (600 / 2, 6)


@pytest.mark.parametrize(
    ("unknown", "now"),
    [
        (presence(None), 1.0),
        (presence(msgspec.structs.replace(KNOWN, waiting=1, head_tokens=None)), 1.0),
        (presence(KNOWN), 20.0),
        (presence(KNOWN, no_transfer="it lends nothing"), 1.0),
    ],
)
def test_what_is_not_known_or_lends_nothing_takes_no_part(unknown: Presence, now: float) -> None:
    assert room_of(unknown, now, Usage(0, requests=0)) is None


# Properties


@dataclass
class Fleet:
    """Workers whose requests neither grow nor end. Those that wait are let in, in order, as room comes."""

    slots: dict[str, int]
    running: dict[str, dict[str, Candidate]]
    waiting: dict[str, list[Candidate]]
    moved: dict[str, int] = field(default_factory=dict)
    thrashing: frozenset[str] = frozenset()

    def rooms(self) -> list[WorkerRoom]:
        return [
            self._thrashing(
                lease,
                sum(one.tokens for one in theirs.values()),
                len(theirs),
                head=self.waiting[lease][0].tokens if self.waiting[lease] else 0,
                slots=self.slots[lease] - len(theirs),
            )
            for lease, theirs in self.running.items()
        ]

    def _thrashing(self, lease: str, used: int, running: int, *, head: int, slots: int) -> WorkerRoom:
        preempted = sum(one.tokens for one in self.waiting[lease])
        known = room(lease, used, running, head=head, slots=slots)
        return replace(known, preempted_tokens=preempted, thrashing=True) if lease in self.thrashing else known

    def candidates(self) -> Iterator[Candidate]:
        for lease, theirs in self.running.items():
            for one in theirs.values():
                yield Candidate(one.request_id, lease, one.tokens, one.priority)

    def apply(self, transfer: PlannedMigration) -> None:
        one = self.running[transfer.source].pop(transfer.request_id)
        self.running[transfer.destination][transfer.request_id] = one
        self.moved[transfer.request_id] = self.moved.get(transfer.request_id, 0) + 1

    def admit(self) -> None:
        for lease, queue in self.waiting.items():
            theirs = self.running[lease]
            while queue and len(theirs) < self.slots[lease]:
                if sum(one.tokens for one in theirs.values()) + queue[0].tokens > KV:
                    break
                first = queue.pop(0)
                theirs[first.request_id] = first


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    leases = [f"w{number}" for number in range(draw(st.integers(2, 4)))]
    fleet = Fleet({lease: draw(st.integers(1, 12)) for lease in leases}, {one: {} for one in leases}, {})
    for lease in leases:
        drawn = draw(st.lists(st.tuples(st.integers(1, 400), st.integers(-1, 1)), max_size=14))
        fleet.waiting[lease] = [Candidate(f"{lease}-{n}", lease, *drawn_one) for n, drawn_one in enumerate(drawn)]
    fleet.admit()
    fleet.thrashing = draw(st.frozensets(st.sampled_from(leases)))
    return fleet


limits = st.tuples(st.floats(0, 300), st.floats(0, 600)).map(
    lambda pair: RebalancingLimits(below=pair[0], above=pair[1])
)


@given(fleets(), limits)
def test_under_a_load_that_does_not_change_it_comes_to_rest(fleet: Fleet, limits: RebalancingLimits) -> None:
    requests = sum(map(len, fleet.running.values())) + sum(map(len, fleet.waiting.values()))
    # A migration takes a request off a worker below the range for good, unless it lets in another one.
    most = (requests + 1) * (sum(map(len, fleet.waiting.values())) + 1)
    for _ in range(most + 1):
        transfers = plan(fleet.rooms(), fleet.candidates(), limits)
        if not transfers:
            return
        for transfer in transfers:
            fleet.apply(transfer)
        fleet.admit()
    pytest.fail("it has not come to rest")


@given(fleets(), limits)
def test_no_move_makes_its_destination_less_free_than_its_source_was(fleet: Fleet, limits: RebalancingLimits) -> None:
    for transfer in plan(fleet.rooms(), fleet.candidates(), limits):
        before = {one.lease: one.freeness for one in fleet.rooms()}
        fleet.apply(transfer)
        after = {one.lease: one for one in fleet.rooms()}[transfer.destination]
        assert after.freeness >= transfer.floor >= max(limits.below, before[transfer.source]) - 1e-6
        assert after.free_tokens >= 0
        assert after.slots >= 0
        assert transfer.source != transfer.destination


@given(fleets(), limits)
def test_no_request_migrates_twice_in_one_plan_and_queues_only_shrink(fleet: Fleet, limits: RebalancingLimits) -> None:
    blocked = {one.lease for one in fleet.rooms() if one.is_blocked}
    for transfer in plan(fleet.rooms(), fleet.candidates(), limits):
        fleet.apply(transfer)
    assert all(times == 1 for times in fleet.moved.values())
    assert {one.lease for one in fleet.rooms() if one.is_blocked} <= blocked


@given(fleets(), limits, st.randoms())
def test_the_order_of_workers_and_requests_does_not_matter(
    fleet: Fleet, limits: RebalancingLimits, random: object
) -> None:
    rooms, asked = fleet.rooms(), list(fleet.candidates())
    found = plan(rooms, asked, limits)
    random.shuffle(rooms)  # type: ignore[attr-defined]
    random.shuffle(asked)  # type: ignore[attr-defined]
    assert plan(rooms, asked, limits) == found
