"""The registry of keys on disk: cut anywhere, nothing opens, and what was confirmed is read back."""

from __future__ import annotations

import hashlib
import signal
import stat
from pathlib import Path

import pytest

from dynamo_local.core.documents import NewerDocumentError
from dynamo_local.core.errors import StateError
from dynamo_local.core.keys.registry import KeyRegistry, create_key
from dynamo_local.core.keys.values import KeyTerms
from state.documents import DamagedDocumentError, DocumentStore, Stored, decode, encode
from state.endpoints.registry import forget
from state.keys import KEYS, read_key_registry
from state.locks import ServerLock
from state.namespaces import find_servers, with_registry
from state.paths import StatePaths
from state.statefile.leftovers import clear_leftovers
from tests.unit.state.builders import in_child
from tests.unit.state.statefile.test_store import DyingDisk

ONE = create_key(KeyRegistry(), KeyTerms(name="a", requests_per_minute=5), "1" * 64, 1.5)
TWO = create_key(ONE, KeyTerms(name="b", admin=True, endpoints=("chat",)), "2" * 64, 2.5)


@pytest.fixture
def paths(tmp_path: Path) -> StatePaths:
    return StatePaths(tmp_path / "state", "dynamo")


def write(paths: StatePaths, *registries: KeyRegistry) -> None:
    with ServerLock(paths) as lock:
        store = DocumentStore(KEYS, lock)
        store.open()
        for registry in registries:
            store.write(registry)


def test_it_outlives_the_server_and_is_private(paths: StatePaths) -> None:
    assert read_key_registry(paths) == KeyRegistry()
    write(paths, ONE, TWO)
    assert read_key_registry(paths) == TWO
    for path in (paths.keys_file, paths.keys_copy):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_dropping_the_endpoints_leaves_the_keys(paths: StatePaths) -> None:
    write(paths, TWO)
    with ServerLock(paths) as lock:
        assert not forget(lock)
        clear_leftovers(lock)
    assert read_key_registry(paths) == TWO
    assert with_registry(paths.root) == ()
    assert find_servers(paths.root) == find_servers(paths.root / "empty")


def test_a_file_that_is_cut_at_any_byte_is_known_to_be_and_read_from_the_other(paths: StatePaths) -> None:
    write(paths, ONE, TWO)
    data = paths.keys_file.read_bytes()
    for at in range(len(data)):
        with pytest.raises(DamagedDocumentError):
            decode(KEYS, data[:at])
    for path in (paths.keys_file, paths.keys_copy):
        for at in range(0, len(data), 7):
            path.write_bytes(data[:at])
            assert read_key_registry(paths) == TWO
        path.write_bytes(data)


def test_what_cannot_be_read_is_no_empty_registry(paths: StatePaths) -> None:
    write(paths, TWO)
    for path in (paths.keys_file, paths.keys_copy):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StateError, match=r"the registry of keys cannot be read .*answer everybody"):
        read_key_registry(paths)


def test_a_later_release_is_refused_in_one_line(paths: StatePaths) -> None:
    write(paths, ONE)
    newer = encode(KEYS, Stored(ONE, 9)).replace(b'"schema_version": 1', b'"schema_version": 2')
    body = newer[len(b'{"sha256": "", ') + 64 :]
    paths.keys_file.write_bytes(b'{"sha256": "%s", %s' % (hashlib.sha256(body).hexdigest().encode(), body))
    with pytest.raises(NewerDocumentError, match=r"has version 2, .*use the release that wrote it"):
        read_key_registry(paths)


def test_a_writer_that_is_killed_at_any_step_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    for last in range(1000):
        paths = StatePaths(tmp_path / str(last), "dynamo")
        write(paths, ONE)

        def dying(paths: StatePaths = paths, last: int = last) -> None:
            with ServerLock(paths) as lock:
                store = DocumentStore(KEYS, lock, disk=DyingDisk(last))
                store.open()
                store.write(TWO)

        killed = in_child(dying) == -signal.SIGKILL
        assert read_key_registry(paths) in (ONE, TWO)
        if not killed:
            assert read_key_registry(paths) == TWO
            return
    pytest.fail("the writer takes ever more steps")
