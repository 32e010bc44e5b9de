"""Shell completion, by the protocol between click and its scripts, and in a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.shell_completion import BashComplete

from dynamo_local.cli.completion import ASKED_BY
from dynamo_local.cli.main import dynamo
from dynamo_local.core.endpoints.registry import Registry, create
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.messages.endpoints import Board, BoardRevision, EndpointStatus, EndpointView
from state.endpoints.registry import RegistryStore
from state.locks import ServerLock
from state.machine.processes import this_process
from state.paths import StatePaths
from state.record import ServerRecord, write_record
from state.statefile.store import StateStore
from state.statefile.transitions import claim, new_state

PROGRAM = [sys.executable, "-c", "from dynamo_local.cli.main import main; main()"]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder in which no server runs."""
    monkeypatch.delenv("DYN_NAMESPACE", raising=False)
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def server(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StatePaths:
    """A server of namespace here: two workers and a frontend, which serves the model tiny."""
    paths = StatePaths(root, "here")
    state = new_state("here", "ipc:///run/circus.sock", "gpu", this_process())
    state = claim(state, "here_Nats", role="bus", cmd="nats")
    state = claim(state, "here_VllmWorker", role="aggregated", cmd="run", devices=[0])
    state = claim(state, "here_VllmWorker_1", role="aggregated", cmd="run", devices=[1])
    state = claim(state, "here_Frontend", role="frontend", cmd="run")
    StateStore(paths).create(state)
    paths.logs_dir.mkdir()
    paths.run_dir.mkdir(exist_ok=True)
    for name in ("here_Frontend", "circusd"):
        paths.log_file(name).touch()
    write_record(paths, ServerRecord("running", "http://127.0.0.1:9", ("tiny",)))
    (tmp_path / "hub" / "models--Qwen--Qwen3-0.6B").mkdir(parents=True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return paths


def completed(*words: str) -> list[str]:
    """The values that a shell is offered for the last word."""
    shell = BashComplete(dynamo, {}, "dynamo", ASKED_BY)
    return [item.value for item in shell.get_completions(list(words[:-1]), words[-1])]


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["doc"], ["doctor"]),
        (["doctor", "--f"], ["--fix"]),
        (["ps", "--namespace", ""], ["here"]),
        (["drain", ""], ["VllmWorker", "VllmWorker_1"]),
        (["drain", "here_V"], ["here_VllmWorker", "here_VllmWorker_1"]),
        (["role", "VllmWorker", "d"], ["decode"]),
        (["migrate", "--from", "VllmWorker_"], ["VllmWorker_1"]),
        (["restart", "F"], ["Frontend"]),
        (["restart", "N"], []),
        (["scale", "VllmWorker="], ["VllmWorker=1", "VllmWorker=3"]),
        (["logs", "F"], ["Frontend"]),
        (["config", "set", "max-"], ["max-local-prefill-length", "max-prefill-queue-size"]),
        (["run", ""], ["tiny", "smollm2", "random", "quickstart", "Qwen/Qwen3-0.6B"]),
        (["chat", "Q"], ["Qwen/Qwen3-0.6B"]),
        (["serve", "ra"], ["random"]),
        (
            ["serve", "examples.llm.graphs.dis"],
            ["examples.llm.graphs.disagg:Frontend", "examples.llm.graphs.disagg_router:Frontend"],
        ),
        (["serve", "random", "ra"], []),
        (["completion", ""], ["bash", "zsh", "fish"]),
    ],
)
def test_values_are_those_of_the_server(server: StatePaths, words: list[str], values: list[str]) -> None:
    assert completed(*words) == values


@pytest.mark.parametrize(
    "words", [["drain", ""], ["migrate", ""], ["logs", ""], ["scale", ""], ["drain", "--namespace", "a_b", ""]]
)
def test_what_cannot_be_found_out_is_left_out_without_a_word(
    root: Path, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert completed(*words) == []
    assert capfd.readouterr() == ("", "")
    assert not root.exists()


def test_requests_are_left_out_while_there_is_no_bus(server: StatePaths) -> None:
    with ServerLock(server):
        assert completed("migrate", "") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_printed_for_each_shell(shell: str) -> None:
    done = subprocess.run([*PROGRAM, "completion", shell], capture_output=True, text=True, check=True)
    assert f"_DYNAMO_COMPLETE={shell}_complete" in done.stdout
    program = shutil.which(shell)
    if program is not None:
        subprocess.run([program, "-n"], input=done.stdout, text=True, check=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_with_the_script(server: StatePaths, tmp_path: Path) -> None:
    command = tmp_path / "dynamo"
    command.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{PROGRAM[2]}' \"$@\"\n")
    command.chmod(0o755)
    script = """
eval "$(dynamo completion bash)"
COMP_WORDS=(dynamo drain VllmWorker_) COMP_CWORD=2
_dynamo_completion dynamo
printf '%s\\n' "${COMPREPLY[@]}"
"""
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("VllmWorker_1\n", "")


def test_endpoints_and_their_models_are_completed(server: StatePaths) -> None:
    view = EndpointView(EndpointSpec(name="chat", model="m"), EndpointStatus("ready"), 1.0, 2.0, ("chat",))
    board = Board(1, (BoardRevision("chat@2", True, ("chat",)), BoardRevision("chat@3", False, ("new",))), (view,))
    server.board_file.write_bytes(msgspec.json.encode(board))
    server.log_file("here_chat@2_VllmWorker").touch()
    with ServerLock(server) as lock:
        RegistryStore(lock).write(create(Registry(), view.spec, 1.0))
        for words in (["wait", ""], ["requests", "--endpoint", ""], ["queue", "ls", "--endpoint", "c"]):
            assert completed(*words) == ["chat"]
        assert completed("describe", "c") == ["chat"]
        assert completed("logs", "ch") == ["chat", "chat@2_VllmWorker"]
        assert completed("run", "")[:2] == ["tiny", "chat"]
