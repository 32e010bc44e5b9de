"""Memory that endpoints hold, and what goes when there is too little."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.errors import MemoryShortError
from dynamo_local.core.names import Revision, Watcher
from dynamo_local.process.forkserver.prepared.orders import PreparedOrder, write_order
from dynamo_local.supervisor.endpoints.revisions.memory import (
    Holding,
    MemoryRoom,
    explained,
    weights_to_give_up,
)
from state.files import make_private_directory
from state.paths import StatePaths
from state.statefile.model import State
from state.statefile.transitions import claim
from tests.unit.state.builders import empty_state, with_process

GIB = 2**30


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.integers(1, 100)), st.integers(1, 300))
def test_as_few_weights_go_as_are_enough(unused: dict[str, int], missing: int) -> None:
    chosen = weights_to_give_up(unused, missing)
    if sum(unused.values()) < missing:
        assert chosen == ()
        return
    sizes = [unused[key] for key in chosen]
    assert sum(sizes) >= missing
    assert sum(sizes) - min(sizes) < missing
    assert len(chosen) <= len(unused)


def test_the_refusal_says_who_holds_how_much() -> None:
    short = MemoryShortError("0.5 GiB of memory is free, and 1 more worker needs 2.0 GiB", "end", 3 * GIB // 2)
    found = explained(short, [Holding("a", GIB), Holding("b", None, GIB), Holding("c", 0, 2 * GIB), Holding("d")])
    assert str(found) == (
        "0.5 GiB of memory is free, and 1 more worker needs 2.0 GiB; 1.5 GiB would have to go: "
        "endpoint c holds 2.0 GiB of weights for its next worker, endpoint a holds 1.0 GiB, "
        "endpoint b holds an unknown amount and 1.0 GiB of weights for its next worker; "
        "lower the workers of one, delete it, or end other programs"
    )
    assert explained(short, [Holding("d")]) is short


# Memory for more workers of an endpoint: weights that nobody uses go, and the rest is named.

CHAT = Revision("chat", 1)


class Machine:
    """A machine whose kept weights go as soon as their orders do. `code` has a worker; the others have none."""

    def __init__(self, root: Path, free: int) -> None:
        self.paths, self.free = StatePaths(root, "ns"), free
        make_private_directory(self.paths.root)
        make_private_directory(self.paths.run_dir)
        make_private_directory(self.paths.prepared_dir)
        code = Watcher("ns", "VllmWorker", revision="code@1")
        state = claim(empty_state("ns"), code, role="aggregated", cmd="worker", devices=(0,), share=1.0)
        self.state: State = with_process(state, code, "lease", os.getpid())
        self.room = MemoryRoom(self.paths, lambda: self.state, lambda pids: GIB if pids else 0)

    def keep(self, revision: str, gib: int, key: str = "") -> None:
        watcher = Watcher("ns", "VllmWorker", revision=revision)
        write_order(self.paths, watcher, PreparedOrder(key or revision, "module", b"", gib * GIB, 0))
        self.paths.prepared_socket(key or revision).touch()

    def check(self, needed: int) -> None:
        orders = [path.name for path in self.paths.prepared_dir.glob("*.order")]
        for key in ("story@1", "code@1"):
            if not any(key in name for name in orders) and self.paths.prepared_socket(key).exists():
                self.paths.prepared_socket(key).unlink()
                self.free += GIB
        if self.free < needed:
            raise MemoryShortError("too little", "end programs", needed - self.free)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "state", GIB)


def test_weights_without_a_worker_go_first(machine: Machine) -> None:
    machine.keep("story@1", 1)
    machine.keep("code@1", 1)
    asyncio.run(machine.room.require(CHAT, lambda: machine.check(2 * GIB)))
    assert not machine.paths.prepared_socket("story@1").exists()
    assert machine.paths.prepared_socket("code@1").exists()


def test_what_cannot_go_is_named_and_stays(machine: Machine) -> None:
    machine.keep("story@1", 1)
    with pytest.raises(MemoryShortError) as caught:
        asyncio.run(machine.room.require(CHAT, lambda: machine.check(4 * GIB)))
    assert "3.0 GiB would have to go" in str(caught.value)
    assert "endpoint code holds 1.0 GiB, endpoint story holds 1.0 GiB of weights" in str(caught.value)
    assert machine.paths.prepared_socket("story@1").exists()


def test_weights_of_ones_own_are_counted_once(machine: Machine) -> None:
    machine.keep("chat@1", 1, "same")
    machine.keep("story@1", 1, "same")
    assert machine.room.shared_bytes(CHAT) == GIB
    assert machine.room.shared_bytes(Revision("code", 1)) == 0
    # They would not be given up for the endpoint that uses them.
    with pytest.raises(MemoryShortError):
        asyncio.run(machine.room.require(CHAT, lambda: machine.check(2 * GIB)))
    assert machine.paths.prepared_socket("same").exists()
