"""Lease and role of far processes in the books of the head."""

from __future__ import annotations

from dynamo_local.core.messages.presence import Presence
from dynamo_local.supervisor.places.mirror import mirrored
from state.statefile.model import State
from state.statefile.transitions import claim, reserve, set_lease
from tests.unit.state.builders import empty_state

FAR, HERE = "dynamo_VllmWorker", "dynamo_Router"


def presence(watcher: str, lease: str, role: str = "decode") -> Presence:
    return Presence(watcher, watcher.partition("_")[2], role, lease, 77, "ready")


def state() -> State:
    found = claim(empty_state(), FAR, role="decode", cmd="run", devices=(0,), node="n1")
    return set_lease(claim(found, HERE, role="router", cmd="run"), HERE, "own", 12)


def test_a_far_process_has_the_lease_and_role_that_it_announces_and_no_pid() -> None:
    entry = mirrored(state(), [presence(FAR, "lease", "prefill")]).components[FAR]
    assert (entry.lease, entry.role, entry.pid) == ("lease", "prefill", None)


def test_a_far_process_that_is_gone_has_no_lease_and_keeps_its_role() -> None:
    heard = mirrored(state(), [presence(FAR, "lease", "prefill")])
    entry = mirrored(heard, []).components[FAR]
    assert (entry.lease, entry.role) == (None, "prefill")


def test_processes_of_the_head_write_down_their_own() -> None:
    assert mirrored(state(), [presence(HERE, "other", "frontend")]) == state()


def test_what_is_only_reserved_has_no_process() -> None:
    only = reserve(empty_state(), FAR, role="decode", devices=(0,), node="n1")
    assert mirrored(only, [presence(FAR, "lease")]) == only


def test_strangers_are_left_alone() -> None:
    assert mirrored(state(), [presence("dynamo_VllmWorker_7", "lease")]) == state()
