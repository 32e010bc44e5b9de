"""Work goes only to processes whose last presence says "ready", is recent, and has a lease that is not revoked."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dynamo_local.core.beats import BEAT_S, QUIET_BEAT_S
from dynamo_local.core.fleet.view import TTL_S, Change, FleetView, Happened
from dynamo_local.core.messages.presence import Presence, ProcessState

STATES: list[ProcessState] = ["starting", "ready", "parked", "draining", "failed"]


def presence(lease: str, state: ProcessState = "ready", watcher: str | None = None, role: str = "decode") -> Presence:
    name = watcher if watcher is not None else f"ns_Worker_{lease}"
    return Presence(watcher=name, component="Worker", role=role, lease=lease, pid=1, state=state)


def quiet(presence: Presence) -> Presence:
    return msgspec.structs.replace(presence, quiet=True)


def leases(view: FleetView) -> list[str]:
    return [member.lease for member in view.routable()]


@dataclass
class _Expected:
    """The state of one lease by the rules."""

    watcher: str
    state: ProcessState
    heard_at: float
    ttl_s: float

    @property
    def expires_at(self) -> float:
        return self.heard_at + self.ttl_s


class FleetMachine(RuleBasedStateMachine):
    """The view against a model that is written down naively. Watcher 0 has leases 0a, 0b, 0c, and so on."""

    def __init__(self) -> None:
        super().__init__()
        self.view = FleetView()
        self.now = 0.0
        self.known: dict[str, _Expected] = {}
        self.void: set[str] = set()
        self.left: list[str] = []

    @rule(
        watcher=st.integers(0, 2),
        incarnation=st.sampled_from("abc"),
        state=st.sampled_from(STATES),
        is_quiet=st.booleans(),
    )
    def hear(self, watcher: int, incarnation: str, state: ProcessState, is_quiet: bool) -> None:
        lease, name = f"{watcher}{incarnation}", f"ns_Worker_{watcher}"
        said = presence(lease, state, name)
        ttl_s = TTL_S + (QUIET_BEAT_S - BEAT_S if is_quiet else 0)
        changes = self.view.observe(quiet(said) if is_quiet else said, self.now)
        self.note(changes)
        if state == "failed":
            self.hear_of_failure(lease, name, changes)
            return
        if lease in self.void:
            if lease in self.known:
                self.known[lease] = _Expected(name, state, self.now, ttl_s)
            return
        for other in [other for other, known in self.known.items() if known.watcher == name and other != lease]:
            del self.known[other]
            self.void.add(other)
        self.known[lease] = _Expected(name, state, self.now, ttl_s)

    def hear_of_failure(self, lease: str, name: str, changes: list[Change]) -> None:
        """It is gone at once and for good, and so are others of its watcher, unless it is void itself. Each is told of
        once."""
        gone = {lease} & self.known.keys()
        if lease not in self.void:
            gone = {lease, *(other for other, known in self.known.items() if known.watcher == name)}
        assert sorted(change.presence.lease for change in changes) == sorted(gone)
        assert {change.presence.lease for change in changes if change.failed} == gone & {lease}
        self.known = {other: known for other, known in self.known.items() if other not in gone}
        self.void |= gone

    @rule(watcher=st.integers(0, 2), incarnation=st.sampled_from("abc"))
    def hear_again(self, watcher: int, incarnation: str) -> None:
        lease = f"{watcher}{incarnation}"
        assert self.view.heard_again(lease, self.now) == (lease in self.known)
        if lease in self.known:
            self.known[lease].heard_at = self.now

    @rule(watcher=st.integers(0, 2), incarnation=st.sampled_from("abc"))
    def revoke(self, watcher: int, incarnation: str) -> None:
        lease = f"{watcher}{incarnation}"
        self.note(self.view.revoke(lease))
        self.void.add(lease)

    @rule(seconds=st.sampled_from([0.25, 1.0, TTL_S, TTL_S + 0.25]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.note(self.view.expire(self.now))
        self.known = {lease: k for lease, k in self.known.items() if self.now <= k.expires_at}

    def note(self, changes: list[Change]) -> None:
        self.left += [change.presence.lease for change in changes if change.what is Happened.LEFT]

    @invariant()
    def routable_are_the_ready_the_heard_and_the_valid(self) -> None:
        expected = [
            (known.watcher, lease)
            for lease, known in self.known.items()
            if known.state == "ready" and lease not in self.void
        ]
        assert [(p.watcher, p.lease) for p in self.view.routable()] == sorted(expected)

    @invariant()
    def parked_are_the_parked_the_heard_and_the_valid(self) -> None:
        expected = {lease for lease, known in self.known.items() if known.state == "parked" and lease not in self.void}
        assert {p.lease for p in self.view.parked()} == expected

    @invariant()
    def members_are_those_who_have_not_left(self) -> None:
        assert {member.lease for member in self.view.members()} == set(self.known)
        assert all((self.view.get(lease) is None) == (lease not in self.known) for lease in self.left)

    @invariant()
    def nobody_expires_before_it_is_said(self) -> None:
        assert self.view.next_expiry() == min((known.expires_at for known in self.known.values()), default=math.inf)

    @invariant()
    def silent_are_those_about_to_expire(self) -> None:
        about_to = {lease for lease, known in self.known.items() if self.now + 1.0 > known.expires_at}
        assert {presence.lease for presence in self.view.silent(self.now, 1.0)} == about_to


TestFleetAgainstAModel = FleetMachine.TestCase


def test_all_are_quiet_or_somebody_is_not() -> None:
    view = FleetView()
    view.observe(quiet(presence("a")), 0.0)
    assert view.quiet()
    view.observe(presence("b"), 0.0)
    assert not view.quiet()
    view.observe(quiet(presence("b")), 0.0)
    assert view.quiet()


@given(st.permutations([presence(lease, state) for lease, state in zip("abcde", STATES, strict=True)]))
def test_the_order_in_which_processes_are_heard_does_not_matter(heard: list[Presence]) -> None:
    view = FleetView()
    for one in heard:
        view.observe(one, 0.0)
    assert [member.lease for member in view.members()] == ["a", "b", "c", "d"]
    assert leases(view) == ["b"]


def test_only_workers_are_routable() -> None:
    view = FleetView()
    for role in ("aggregated", "decode", "prefill", "frontend", "router"):
        view.observe(presence(role, role=role), 0.0)
    assert leases(view) == ["aggregated", "decode"]
    assert [p.role for p in view.routable(["prefill"])] == ["prefill"]


def test_silence_up_to_the_limit_is_no_absence() -> None:
    view = FleetView()
    view.observe(presence("a"), 10.0)
    assert view.expire(10.0 + TTL_S) == []
    assert [change.what for change in view.expire(10.0 + TTL_S + 0.01)] == [Happened.LEFT]
    assert leases(view) == []


def test_who_was_silent_may_come_back() -> None:
    view = FleetView()
    view.observe(presence("a"), 0.0)
    view.expire(100.0)
    assert [change.what for change in view.observe(presence("a"), 101.0)] == [Happened.APPEARED]
    assert leases(view) == ["a"]


def test_a_beat_without_news_is_no_change() -> None:
    view = FleetView()
    view.observe(presence("a"), 0.0)
    assert view.observe(presence("a"), 1.0) == []
    assert view.observe(presence("a", "draining"), 1.5) == [Change(Happened.UPDATED, presence("a", "draining"))]


def test_a_new_incarnation_ends_the_old_one_for_good() -> None:
    view = FleetView()
    view.observe(presence("old", watcher="ns_Worker"), 0.0)
    changes = view.observe(presence("new", watcher="ns_Worker"), 0.1)
    assert [(change.what, change.presence.lease) for change in changes] == [
        (Happened.LEFT, "old"),
        (Happened.APPEARED, "new"),
    ]
    assert view.observe(presence("old", watcher="ns_Worker"), 0.2) == []
    assert leases(view) == ["new"]


def test_a_revoked_process_is_told_once_and_missed_when_it_dies() -> None:
    """Its requests may still be under way: their frontends have to learn that it is gone."""
    view = FleetView()
    view.observe(presence("a"), 0.0)
    assert [change.what for change in view.revoke("a")] == [Happened.REVOKED]
    assert view.revoke("a") == []
    assert view.observe(presence("a", "draining"), 1.5) == []
    assert leases(view) == []
    assert view.get("a") is not None
    assert view.expire(1.5 + TTL_S) == []
    assert [change.what for change in view.expire(1.6 + TTL_S)] == [Happened.LEFT]
    assert view.observe(presence("a"), 10.0) == []
    assert view.members() == []


@pytest.mark.parametrize("before", [None, "starting", "ready", "draining"])
def test_a_worker_that_has_failed_is_gone_for_good(before: ProcessState | None) -> None:
    """Also for those who hear of it for the first time; whatever it says later, and while it is silent."""
    view = FleetView()
    if before is not None:
        view.observe(presence("a", before), 0.0)
    failed = presence("a", "failed")
    (change,) = view.observe(failed, 0.1)
    assert (change, change.failed) == (Change(Happened.LEFT, failed), True)
    for state in STATES:
        assert view.observe(presence("a", state), 0.2) == []
    assert view.expire(100.0) == []
    assert view.observe(presence("a"), 101.0) == []
    assert view.get("a") is None
    assert view.members() == []


def test_a_worker_that_drains_or_is_revoked_and_then_fails_is_gone_at_once() -> None:
    view = FleetView()
    view.observe(presence("a", "draining"), 0.0)
    view.revoke("a")
    assert [change.failed for change in view.observe(presence("a", "failed"), 0.1)] == [True]
    assert view.members() == []


def test_a_late_word_of_failure_does_not_displace_the_living() -> None:
    view = FleetView()
    view.observe(presence("old", watcher="ns_Worker"), 0.0)
    view.observe(presence("new", watcher="ns_Worker"), 0.1)
    assert view.observe(presence("old", "failed", watcher="ns_Worker"), 0.2) == []
    assert leases(view) == ["new"]


def test_who_falls_silent_or_is_replaced_has_not_failed() -> None:
    view = FleetView()
    view.observe(presence("old", watcher="ns_Worker"), 0.0)
    assert [change.failed for change in view.observe(presence("new", watcher="ns_Worker"), 0.1)] == [False, False]
    assert [change.failed for change in view.expire(100.0)] == [False]


def test_a_frontend_that_has_failed_finishes_its_streams() -> None:
    view = FleetView()
    view.observe(presence("f", role="frontend"), 0.0)
    assert [change.what for change in view.observe(presence("f", "failed", role="frontend"), 0.1)] == [Happened.UPDATED]
    assert view.get("f") is not None


def test_a_lease_revoked_before_it_was_ever_heard_never_appears() -> None:
    view = FleetView()
    assert view.revoke("a") == []
    assert view.observe(presence("a"), 0.0) == []
    assert view.members() == []


@pytest.mark.parametrize(("excused_s", "stays"), [(3.0, True), (0.5, False)])
def test_silence_is_excused_by_as_much_as_this_process_was_deaf(excused_s: float, stays: bool) -> None:
    view = FleetView()
    view.observe(presence("a"), 0.0)
    view.excuse_silence(4.0, excused_s)
    assert (view.expire(4.0) == []) is stays


def test_an_excuse_is_no_credit() -> None:
    view = FleetView()
    view.observe(presence("a"), 4.0)
    view.excuse_silence(5.0, 100.0)
    assert view.expire(5.0 + TTL_S) == []
    assert len(view.expire(5.1 + TTL_S)) == 1
