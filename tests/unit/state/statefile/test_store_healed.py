"""A statefile that is damaged while its server runs: nothing that was written is lost."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamo_local.core.errors import NotRunningError, StateError
from state.files import Disk
from state.locks import Clock, ServerLock
from state.paths import StatePaths
from state.statefile.model import State, encode
from state.statefile.store import StateStore, UnreadableError
from state.statefile.transitions import claim, next_watcher, release
from tests.unit.state.builders import disaggregated, empty_state, in_child, states
from tests.unit.state.statefile.test_store import DyingDisk


@pytest.fixture
def paths(tmp_path: Path) -> StatePaths:
    return made(tmp_path)


def made(root: Path) -> StatePaths:
    paths = StatePaths(root / "state", "dynamo")
    paths.run_dir.mkdir(mode=0o700, parents=True)
    paths.root.chmod(0o700)
    return paths


def released(state: State) -> State:
    return release(state, "dynamo_PrefillWorker")


def _emptied(path: Path) -> None:
    path.write_bytes(b"")


def _brace(path: Path) -> None:
    path.write_text("{\n")


def _of_another_namespace(path: Path) -> None:
    path.write_bytes(encode(empty_state("other")))


def _of_another_version(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"schema_version": 6', b'"schema_version": 9'))


def _closed(path: Path) -> None:
    # root may read whatever its mode is; a loop of links nobody can.
    path.unlink()
    path.symlink_to(path.name)


class _Quick(Disk):
    """Does not wait for the disk."""

    def sync(self, descriptor: int) -> None:
        pass

    def sync_directory(self, directory: Path) -> None:
        pass


HARM: tuple[Callable[[Path], None], ...] = (
    _emptied,
    _brace,
    Path.unlink,
    _of_another_namespace,
    _of_another_version,
    _closed,
)


def healed(store: StateStore) -> State:
    """What the statefile is healed to."""
    store.heal()
    return store.read_file()


@pytest.mark.parametrize("harm", HARM)
def test_reads_updates_and_the_server_go_on_from_the_copy(paths: StatePaths, harm: Callable[[Path], None]) -> None:
    store = StateStore(paths)
    store.create(disaggregated())
    harm(paths.statefile)
    assert store.read() == disaggregated()
    assert store.update(released) == released(disaggregated()) == store.read()
    assert store.heal()
    assert paths.statefile.read_bytes() == encode(released(disaggregated()))
    assert not paths.statefile.is_symlink()
    assert store.heal() is None


def test_cut_or_changed_at_any_byte_it_is_healed_to_the_last_state(paths: StatePaths) -> None:
    store = StateStore(paths, disk=_Quick())
    store.create(disaggregated())
    last = store.update(released)
    whole = paths.statefile.read_bytes()
    for place in range(len(whole) - 1):
        for harmed in (whole[:place], whole[:place] + b"\xff" + whole[place + 1 :]):
            paths.statefile.write_bytes(harmed)
            assert store.read() == last
            if place % 16 == 0:
                assert healed(store) == last
                assert paths.statefile.read_bytes() == whole


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(before=states(), after=states(), cut=st.integers(0, 200))
def test_any_update_survives_damage_before_and_after_it(
    tmp_path_factory: pytest.TempPathFactory, before: State, after: State, cut: int
) -> None:
    paths = made(tmp_path_factory.mktemp("state"))
    store = StateStore(paths)
    after = msgspec.structs.replace(after, owner=before.owner)
    store.create(before)
    os.truncate(paths.statefile, cut)
    assert store.update(lambda _: after) == after
    assert healed(store) == after == store.read()
    os.truncate(paths.statefile, cut)
    assert healed(store) == after


def test_without_a_copy_the_server_writes_what_it_remembers(paths: StatePaths) -> None:
    store = StateStore(paths)
    store.create(disaggregated())
    store.update(released)
    _brace(paths.statefile)
    _brace(paths.state_copy)
    with pytest.raises(UnreadableError, match="not a statefile"):
        StateStore(paths).heal()
    assert store.heal() is not None
    assert StateStore(paths).read() == released(disaggregated())
    # The copy as well.
    paths.statefile.unlink()
    assert StateStore(paths).read() == released(disaggregated())


def test_while_a_server_runs_readers_and_writers_wait_for_it(paths: StatePaths) -> None:
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            healing.heal()

    store = StateStore(paths, clock=Clock(now=lambda: sum(naps), sleep=nap))
    store.create(disaggregated())
    healing = StateStore(paths)
    healing.read()
    for path in (paths.statefile, paths.state_copy):
        path.unlink()
    with ServerLock(paths):
        assert store.read() == disaggregated()
        _brace(paths.statefile)
        _brace(paths.state_copy)
        naps.clear()
        assert store.update(released) == released(disaggregated())
        _brace(paths.statefile)
        _brace(paths.state_copy)
        naps[:] = [0.0] * 3
        with pytest.raises(StateError, match="not a statefile"):
            store.update(released)


def test_without_a_server_nobody_waits(paths: StatePaths) -> None:
    def nap(_: float) -> None:
        raise AssertionError("waited")

    store = StateStore(paths, clock=Clock(sleep=nap))
    with pytest.raises(NotRunningError):
        store.read()
    _brace(paths.statefile)
    with pytest.raises(UnreadableError):
        store.read()


def test_no_copy_outlives_the_statefile(paths: StatePaths) -> None:
    store = StateStore(paths)
    store.create(disaggregated())
    store.remove()
    assert list(paths.run_dir.iterdir()) == []
    with pytest.raises(NotRunningError):
        store.read()


def _harm_until(over: threading.Event, paths: StatePaths) -> None:
    for what in itertools.cycle(HARM):
        if over.is_set():
            return
        with suppress(OSError):
            what(paths.statefile)


def _heal_until(over: threading.Event, paths: StatePaths, damages: list[str]) -> None:
    while not over.is_set():
        damage = StateStore(paths).heal()
        if damage is not None:
            damages.append(damage)


def test_concurrent_updates_lose_nothing_while_the_file_is_damaged_again_and_again(paths: StatePaths) -> None:
    StateStore(paths).create(empty_state())
    over = threading.Event()
    damages: list[str] = []

    def work(_: int) -> None:
        store = StateStore(paths)
        for _ in range(10):
            store.update(lambda state: claim(state, next_watcher(state, "VllmWorker"), role="decode", cmd="run"))

    others = [
        threading.Thread(target=_harm_until, args=(over, paths)),
        threading.Thread(target=_heal_until, args=(over, paths, damages)),
    ]
    for thread in others:
        thread.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
    finally:
        over.set()
        for thread in others:
            thread.join()
    assert len(healed(StateStore(paths)).components) == 40
    assert damages


def test_a_kill_between_any_two_steps_and_damage_leave_the_old_or_the_new_state(paths: StatePaths) -> None:
    store = StateStore(paths, disk=_Quick())
    store.create(empty_state())
    kills = 0
    for last in itertools.count():
        old = store.read()
        new = msgspec.structs.replace(empty_state(), environment={"DYN_LOG": str(last)})
        dying = StateStore(paths, disk=DyingDisk(last))
        code = in_child(lambda dying=dying, new=new: dying.update(lambda _: new))  # type: ignore[misc]
        found = store.read()
        assert found in (old, new)
        # The copy may be ahead by this one update, never behind.
        _brace(paths.statefile)
        assert healed(store) in (found, new)
        if code == 0:
            assert found == new
            break
        kills += 1
    # Twice create, 3 writes or more, rename; and what makes the statefile durable.
    assert kills >= 12
