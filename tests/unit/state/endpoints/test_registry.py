"""The registry on disk: whatever happens to one of its files, or to the disk, what was confirmed is read back."""

from __future__ import annotations

import hashlib
import os
import signal
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_local.core.endpoints.checks import read_spec
from dynamo_local.core.endpoints.registry import (
    CONVERSIONS,
    SCHEMA_VERSION,
    NewerRegistryError,
    Registry,
    create,
    to_document,
)
from dynamo_local.core.errors import StateError
from state.documents import DamagedDocumentError, Stored, decode, encode
from state.endpoints.registry import REGISTRY, RegistryStore, forget, has_registry, read_registry
from state.files import DiskError
from state.locks import ServerLock
from state.namespaces import find_servers, with_registry
from state.paths import StatePaths
from state.statefile.leftovers import clear_leftovers
from tests.unit.state.builders import in_child
from tests.unit.state.statefile.test_store import DyingDisk
from tests.unit.state.stepping_disk import SteppingDisk


def registry_of(*names: str) -> Registry:
    registry = Registry()
    for name in names:
        registry = create(registry, read_spec({"name": name, "model": "m", "labels": {"of": "\u00e9"}}), 1.5)
    return registry


ONE, TWO = registry_of("a"), registry_of("a", "b")


@pytest.fixture
def paths(tmp_path: Path) -> StatePaths:
    return StatePaths(tmp_path / "state", "dynamo")


@pytest.fixture
def lock(paths: StatePaths) -> Iterator[ServerLock]:
    with ServerLock(paths) as lock:
        yield lock


def written(lock: ServerLock, *registries: Registry) -> RegistryStore:
    store = RegistryStore(lock)
    store.open()
    for registry in registries:
        store.write(registry)
    return store


def files(paths: StatePaths) -> set[str]:
    return {path.name for path in paths.root.iterdir() if path != paths.server_lock}


class TestLife:
    def test_there_is_none_at_first(self, paths: StatePaths, lock: ServerLock) -> None:
        assert read_registry(paths) == Registry()
        assert RegistryStore(lock).open() == (Registry(), ())
        assert not has_registry(paths)
        assert files(paths) == set()

    def test_what_is_written_is_read_by_anybody_and_by_the_next_server(
        self, paths: StatePaths, lock: ServerLock
    ) -> None:
        written(lock, ONE, TWO)
        assert read_registry(paths) == TWO
        assert RegistryStore(lock).open() == (TWO, ())
        assert files(paths) == {"dynamo.endpoints.json", "dynamo.endpoints.copy.json"}

    def test_files_are_private(self, paths: StatePaths, lock: ServerLock) -> None:
        before = os.umask(0)
        try:
            written(lock, ONE, TWO)
        finally:
            os.umask(before)
        for path in (paths.registry_file, paths.registry_copy):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def test_it_is_written_and_dropped_under_the_server_lock_alone(self, paths: StatePaths) -> None:
        lock = ServerLock(paths)
        with pytest.raises(StateError, match="under the server lock"):
            RegistryStore(lock).write(ONE)
        with pytest.raises(StateError, match="under the server lock"):
            forget(lock)

    def test_forgetting_leaves_nothing(self, paths: StatePaths, lock: ServerLock) -> None:
        written(lock, ONE)
        paths.registry_file.write_bytes(b"damaged")
        paths.registry_copy.with_name(f"{paths.registry_copy.name}.tmp").touch()
        paths.registry_backup(0).touch()
        paths.endpoint_use_file.touch()
        assert forget(lock)
        assert files(paths) == set()
        assert not forget(lock)

    def test_neither_is_it_taken_for_a_server_nor_cleared_with_one(self, paths: StatePaths, lock: ServerLock) -> None:
        written(lock, ONE)
        assert with_registry(paths.root) == ("dynamo",)
        clear_leftovers(lock)
        lock.release()
        assert find_servers(paths.root) == find_servers(paths.root / "empty")
        assert read_registry(paths) == ONE


Damage = Callable[[bytes, int], bytes]
DAMAGES: dict[str, Damage] = {
    "cut": lambda data, at: data[:at],
    "flipped": lambda data, at: data[:at] + bytes([data[at] ^ 0x01]) + data[at + 1 :],
    "zeroed": lambda data, at: data[:at] + bytes(len(data) - at),
}


class TestDamage:
    @pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
    def test_a_file_that_is_damaged_anywhere_is_known_to_be(self, damage: Damage) -> None:
        data = encode(REGISTRY, Stored(TWO, 7))
        assert decode(REGISTRY, data) == Stored(TWO, 7)
        for at in range(len(data)):
            with pytest.raises(DamagedDocumentError):
                decode(REGISTRY, damage(data, at))

    @pytest.mark.parametrize("name", ["registry_file", "registry_copy"])
    @pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
    def test_the_other_file_is_read_and_both_are_whole_again(
        self, paths: StatePaths, lock: ServerLock, name: str, damage: Damage
    ) -> None:
        written(lock, ONE, TWO)
        path: Path = getattr(paths, name)
        data = path.read_bytes()
        for at in range(0, len(data), 41):
            path.write_bytes(damage(data, at))
            assert read_registry(paths) == TWO
        registry, notes = RegistryStore(lock).open()
        assert (registry, len(notes)) == (TWO, 1)
        assert str(path) in notes[0]
        for each in (paths.registry_file, paths.registry_copy):
            assert decode(REGISTRY, each.read_bytes()).content == TWO
        assert RegistryStore(lock).open() == (TWO, ())

    @pytest.mark.parametrize("name", ["registry_file", "registry_copy"])
    def test_a_file_that_is_gone_is_written_anew(self, paths: StatePaths, lock: ServerLock, name: str) -> None:
        written(lock, TWO)
        getattr(paths, name).unlink()
        assert read_registry(paths) == TWO
        assert RegistryStore(lock).open()[0] == TWO
        assert getattr(paths, name).exists()

    def test_of_two_good_files_the_later_one_holds(self, paths: StatePaths, lock: ServerLock) -> None:
        written(lock, ONE)
        before = paths.registry_file.read_bytes()
        written(lock, TWO)
        for path in (paths.registry_file, paths.registry_copy):
            after = path.read_bytes()
            path.write_bytes(before)
            assert read_registry(paths) == TWO
            path.write_bytes(after)

    def test_two_damaged_files_are_one_error_with_the_way_out(self, paths: StatePaths, lock: ServerLock) -> None:
        written(lock, TWO)
        paths.registry_file.write_bytes(b"")
        paths.registry_copy.write_bytes(paths.registry_copy.read_bytes()[:-1])
        for read in (lambda: read_registry(paths), RegistryStore(lock).open):
            with pytest.raises(StateError, match=r"cannot be read .*--forget") as caught:
                read()
            assert "\n" not in str(caught.value)
            assert str(paths.registry_file) in str(caught.value)

    def test_a_folder_in_place_of_a_file_is_damage(self, paths: StatePaths, lock: ServerLock) -> None:
        written(lock, TWO)
        paths.registry_copy.unlink()
        paths.registry_copy.mkdir()
        assert read_registry(paths) == TWO


def of_version(version: int, data: dict[str, Any]) -> bytes:
    """A file as a release of that version would write it, with sequence number 3."""
    body = msgspec.json.encode({"sequence": 3, "schema_version": version, **data})[1:] + b"\n"
    return b'{"sha256": "%s", %s' % (hashlib.sha256(body).hexdigest().encode(), body)


class TestVersions:
    def test_a_later_release_is_refused_in_one_line(self, paths: StatePaths, lock: ServerLock) -> None:
        written(lock, ONE)
        paths.registry_copy.write_bytes(of_version(SCHEMA_VERSION + 1, {"news": 1}))
        for read in (lambda: read_registry(paths), RegistryStore(lock).open):
            with pytest.raises(NewerRegistryError, match=r"use the release that wrote it, or drop .* --forget"):
                read()

    def test_an_earlier_release_is_converted_and_backed_up(self, paths: StatePaths, lock: ServerLock) -> None:
        """Version 0, which never was, had a list of names."""

        def from_0(document: dict[str, Any]) -> dict[str, Any]:
            converted = to_document(registry_of(*document["names"]))
            return {name: value for name, value in converted.items() if name != "schema_version"}

        old = of_version(0, {"names": ["a", "b"]})
        for path in (paths.registry_file, paths.registry_copy):
            path.write_bytes(old)
        assert read_registry(paths, {**CONVERSIONS, 0: from_0}) == TWO
        registry, notes = RegistryStore(lock, conversions={**CONVERSIONS, 0: from_0}).open()
        assert registry == TWO
        assert any("from version 0" in note for note in notes)
        assert paths.registry_backup(0).read_bytes() == old
        assert RegistryStore(lock).open() == (TWO, ())

    def test_a_conversion_that_was_killed_half_way_holds(self, paths: StatePaths, lock: ServerLock) -> None:
        paths.registry_file.write_bytes(of_version(0, {}))
        paths.registry_copy.write_bytes(encode(REGISTRY, Stored(ONE, 4)))
        assert RegistryStore(lock, conversions={**CONVERSIONS, 0: lambda _: {}}).open()[0] == ONE
        assert read_registry(paths) == ONE


class FailingDisk(SteppingDisk):
    """Fails from step number `first` on, for `times` steps, as a full disk does."""

    at_once = 200

    def __init__(self, first: int, times: int) -> None:
        self.failing = range(first, first + times)
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps - 1 in self.failing:
            raise OSError(28, "No space left on device")


class TestFaults:
    @pytest.mark.parametrize("times", [1, 2, 1000])
    @pytest.mark.parametrize("before", [(), (ONE,)], ids=["first", "later"])
    def test_an_order_that_is_refused_is_not_made(self, tmp_path: Path, before: Sequence[Registry], times: int) -> None:
        known = before[-1] if before else Registry()
        for first in range(1000):
            paths = StatePaths(tmp_path / str(first), "dynamo")
            with ServerLock(paths) as lock:
                written(lock, *before)
                disk = FailingDisk(first, times)
                store = RegistryStore(lock, disk=disk)
                store.open()
                holds = known
                with suppress(DiskError):
                    store.write(TWO)
                    holds = TWO
                assert read_registry(paths) == holds
                assert not [name for name in files(paths) if name.endswith(".tmp")]
                assert RegistryStore(lock).open()[0] == holds
                written(lock, ONE)
                assert read_registry(paths) == ONE
            if disk.steps <= first:
                break
        else:
            pytest.fail("the disk takes ever more steps")

    def test_a_writer_that_is_killed_at_any_step_leaves_the_old_or_the_new(self, tmp_path: Path) -> None:
        for last in range(1000):
            paths = StatePaths(tmp_path / str(last), "dynamo")
            with ServerLock(paths) as lock:
                written(lock, ONE)

            def write(paths: StatePaths = paths, last: int = last) -> None:
                with ServerLock(paths) as lock:
                    store = RegistryStore(lock, disk=DyingDisk(last))
                    store.open()
                    store.write(TWO)

            killed = in_child(write) == -signal.SIGKILL
            assert read_registry(paths) in (ONE, TWO)
            with ServerLock(paths) as lock:
                assert RegistryStore(lock).open()[0] == read_registry(paths)
                assert paths.registry_file.read_bytes() == paths.registry_copy.read_bytes()
            if not killed:
                assert read_registry(paths) == TWO
                return
        pytest.fail("the writer takes ever more steps")
