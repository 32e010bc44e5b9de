from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_local.core.errors import ConfigError
from state.paths import Sockets, StatePaths, state_root


def test_the_root_is_under_home_unless_set() -> None:
    assert state_root({"HOME": "/home/ada"}) == Path("/home/ada/.dynamo/state")
    assert state_root({"HOME": "/home/ada", "DYN_LOCAL_STATE_DIR": ""}) == Path("/home/ada/.dynamo/state")
    assert state_root({"HOME": "/home/ada", "DYN_LOCAL_STATE_DIR": "/data/dyn"}) == Path("/data/dyn")


def test_a_relative_root_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert state_root({"DYN_LOCAL_STATE_DIR": "here"}) == tmp_path / "here"


def test_every_file_of_a_namespace_is_its_own() -> None:
    names = [
        getattr(StatePaths(Path("/s"), namespace), name)
        for namespace in ("a", "a-json", "b")
        for name in ("statefile", "update_lock", "server_lock", "run_dir", "logs_dir", "unreadable_statefile")
    ]
    assert len(set(names)) == len(names)


def test_the_documented_names() -> None:
    paths = StatePaths.of("demo", {"DYN_LOCAL_STATE_DIR": "/s"})
    assert paths.statefile == Path("/s/demo.json")
    assert paths.server_lock == Path("/s/demo.lock")
    assert paths.update_lock == Path("/s/demo.json.lock")
    assert paths.graph_file == Path("/s/demo.run/graph.json")
    assert paths.bus_file == Path("/s/demo.run/bus.json")
    assert paths.nats_config == Path("/s/demo.run/nats/nats.conf")
    assert paths.log_file("demo_Frontend") == Path("/s/demo.logs/demo_Frontend.log")
    assert Sockets(paths.run_dir).circus_endpoint == "ipc:///s/demo.run/circus.sock"


def test_each_path_in_the_root_ends_with_the_server_or_is_kept() -> None:
    paths = StatePaths(Path("/s"), "demo")
    names = [name for name, each in vars(StatePaths).items() if isinstance(each, property)]
    top = {name: path for name in names if isinstance(path := getattr(paths, name), Path) and path.parent == paths.root}
    ending = {name for name, path in top.items() if not paths.is_kept(path)}
    assert ending == {"statefile", "unreadable_statefile", "update_lock", "server_lock", "run_dir"}
    assert all(map(paths.is_kept, (paths.keys_backup(1), paths.registry_backup(2))))


def test_what_is_of_another_namespace_or_half_written_is_not_kept() -> None:
    paths = StatePaths(Path("/s"), "demo")
    others = (StatePaths(Path("/s"), "other").usage_dir, Path("/s/demo.keys.json.tmp"), Path("/s/demo"), Path("/s/x"))
    assert not any(map(paths.is_kept, others))


@pytest.mark.parametrize("namespace", ["", "..", "a/b", "a.b", "a_b", "-a"])
def test_a_namespace_cannot_lead_elsewhere(namespace: str) -> None:
    with pytest.raises(ConfigError):
        StatePaths(Path("/s"), namespace)


def test_fit_counts_bytes_not_characters() -> None:
    assert Sockets(Path("/" + "a" * 61)).fit
    assert not Sockets(Path("/" + "a" * 62)).fit
    assert not Sockets(Path("/" + "ä" * 31)).fit
