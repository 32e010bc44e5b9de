"""`dynamo doctor` on folders of the test's own: what it finds there, and what --fix repairs and leaves alone."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.doctor.files import size_of
from dynamo_local.doctor.network import cache_folder, check_hub, check_network
from dynamo_local.doctor.servers import repair, servers
from dynamo_local.supervisor.diagnosis import Server
from state.files import nearest
from state.locks import ServerLock
from state.machine.processes import this_process
from state.paths import StatePaths
from state.remains import SHARED_MEMORY, segment_prefix
from state.statefile.model import Owner
from state.statefile.store import StateStore
from state.statefile.transitions import new_state

LONG_AGO = Owner(pid=1, start_time=987654321)
"""A process that is gone: the one of that pid has started at another time."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def segment(root: Path) -> Iterator[Path]:
    """Shared memory of the server of namespace dead."""
    path = SHARED_MEMORY / f"{segment_prefix(StatePaths(root, 'dead'))}{secrets.token_hex(4)}-x"
    path.write_bytes(b"x")
    yield path
    path.unlink(missing_ok=True)


def facts(root: Path) -> dict[str, Server]:
    return {server.namespace: server for server in servers(root)}


def crash(root: Path, namespace: str = "dead") -> StatePaths:
    """Leave what a killed server leaves."""
    paths = StatePaths(root, namespace)
    StateStore(paths).create(new_state(namespace, "ipc:///run/circus.sock", "gpu", LONG_AGO))
    paths.run_dir.mkdir(mode=0o700, exist_ok=True)
    paths.server_lock.write_text("1\n")
    return paths


def test_what_a_killed_server_left_is_found_and_removed(root: Path, segment: Path) -> None:
    paths = crash(root)
    assert facts(root)["dead"].pid is None
    assert {"a statefile", "a run folder", "a lock", "shared memory"} <= set(facts(root)["dead"].left)
    done = repair(root)
    assert any(str(paths.run_dir) in line for line in done)
    assert not segment.exists()
    assert not paths.statefile.exists()
    assert facts(root) == {}
    assert repair(root) == []


def test_a_running_server_is_left_alone(root: Path) -> None:
    paths = crash(root)
    with ServerLock(paths):
        assert facts(root)["dead"].pid == os.getpid()
        assert repair(root) == []
        assert paths.statefile.exists()
        assert paths.run_dir.exists()


def test_a_server_that_lost_its_lock_file_is_left_alone(root: Path) -> None:
    paths = StatePaths(root, "alive")
    StateStore(paths).create(new_state("alive", "ipc:///run/circus.sock", "gpu", this_process()))
    assert repair(root) == []
    assert paths.statefile.exists()


def test_folders_that_others_can_open_are_closed(root: Path) -> None:
    logs = StatePaths(root, "quiet").logs_dir
    logs.mkdir(mode=0o700)
    root.chmod(0o755)
    logs.chmod(0o770)
    done = repair(root)
    assert done == [f"closed {root} to other users", f"closed {logs} to other users"]
    assert [folder.stat().st_mode & 0o777 for folder in (root, logs)] == [0o700, 0o700]


def test_the_process_on_the_port_is_named() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert [finding.level for finding in check_network("127.0.0.1", port, {})] == ["ok", "ok"]
        listener.listen()
        environ = {"https_proxy": "x", "HTTP_PROXY": "http://user:secret@proxy"}
        on_port, proxy = check_network("127.0.0.1", port, environ)
    assert f"process {os.getpid()}" in on_port.found
    assert proxy.found.startswith("HTTP_PROXY set")
    assert "secret" not in proxy.found + proxy.remedy


@pytest.mark.parametrize(
    ("environ", "cache"),
    [
        ({"HOME": "/h"}, "/h/.cache/huggingface/hub"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"HF_HOME": "/f", "HOME": "/h"}, "/f/hub"),
        ({"HF_HUB_CACHE": "/c", "HF_HOME": "/f", "HOME": "/h"}, "/c"),
    ],
)
def test_the_hub_is_looked_for_where_its_library_does(environ: Mapping[str, str], cache: str) -> None:
    assert cache_folder(environ) == Path(cache)


def test_models_are_counted_and_tokens_not_read(tmp_path: Path) -> None:
    (tmp_path / "hub" / "models--a--b").mkdir(parents=True)
    (tmp_path / "hub" / "models--a--b" / "weights").write_bytes(b"x" * 2**21)
    token = tmp_path / "token"
    token.write_text("hf_secret")
    token.chmod(0o644)
    hub, of_token = check_hub({"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"})
    assert hub.found.startswith(f"offline (HF_HUB_OFFLINE); 1 models in {tmp_path / 'hub'}, ")
    assert not hub.found.endswith(" 0 MiB")
    assert (of_token.level, of_token.found) == ("warn", f"other users can read {token}")


def test_a_large_folder_is_not_added_up(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / str(number)).touch()
    assert size_of(tmp_path, at_most_files=4) is None
    assert size_of(tmp_path, at_most_files=5) == 0
    assert nearest(tmp_path / "a" / "b") == tmp_path


def doctor(environ: Mapping[str, str], *arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "dynamo_local.cli.main", "doctor", "--json", *arguments]
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, check=False)
    return done.returncode, json.loads(done.stdout)


def test_the_command_fixes_and_exits_with_1_if_a_check_fails(root: Path, tmp_path: Path) -> None:
    crash(root)
    environ = {"DYN_LOCAL_STATE_DIR": str(root), "DYN_LOCAL_CACHE_DIR": str(tmp_path), "HF_ENDPOINT": "nonsense"}
    code, told = doctor(environ)
    levels = {finding["check"]: finding["level"] for finding in told["findings"]}
    assert (code, levels["hub"], levels["server dead"], told["fixed"]) == (1, "fail", "warn", [])
    code, told = doctor(environ, "--fix")
    assert told["fixed"]
    assert code == 1
    assert "server dead" not in {finding["check"] for finding in told["findings"]}


def test_neither_vllm_nor_torch_is_imported() -> None:
    script = """
import sys
from dynamo_local.cli.main import run
run(["doctor"])
print(sorted({"torch", "transformers", "vllm"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
