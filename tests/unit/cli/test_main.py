"""The command line: exit codes, one-line errors, and what a look at the help costs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dynamo_local.cli.main import run
from state.locks import ServerLock
from state.paths import StatePaths

GRAPH = "tests.unit.cli.graph:Front"


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    error: str


class Cli:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Outcome:
        code = run(arguments)
        captured = self._capsys.readouterr()
        return Outcome(code, captured.out, captured.err)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("NATS_SERVER", "NATS_TOKEN", "NATS_CA", "DYN_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DYN_CPU_SLOTS", "2")
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], root: Path) -> Cli:
    return Cli(capsys)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_the_command_line_imports_nothing_heavy() -> None:
    heavy = {"asyncio", "circus", "msgspec", "nats", "prometheus_client", "rich", "tensorboard", "torch"}
    heavy |= {"ray", "transformers", "vllm", "yaml", "zmq"}
    script = f"""
import sys
from dynamo_local.cli.main import run
assert run(["--help"]) == 0 and run(["serve", "--help"]) == 0
print(sorted({heavy!r} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_planning_imports_neither_vllm_nor_torch_nor_ray() -> None:
    script = f"""
import sys
from dynamo_local.cli.main import run
assert run(["serve", "{GRAPH}", "--dry-run"]) == 0
print(sorted({{"ray", "torch", "transformers", "vllm"}} & set(sys.modules)))
"""
    environ = {**os.environ, "DYN_CPU_SLOTS": "2"}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environ)
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["frobnicate"], "there is no command dynamo frobnicate; see `dynamo --help`"),
        (["serve"], "no graph named"),
        (["serve", GRAPH, "extra"], "'extra' is one argument too many"),
        (["serve", GRAPH, "--nonsense"], "there is no option --nonsense"),
        (["serve", GRAPH, "-x"], "there is no option -x"),
        (["serve", GRAPH, "--json"], "--json goes with --explain and --dry-run only"),
        (["serve", GRAPH, "--port", "70000"], "70000 is not in the range"),
        (["serve", GRAPH, "--host", "203.0.113.1"], "cannot listen on 203.0.113.1:8000"),
        (["serve", "no.such.module:X"], "there is no module no"),
        (["serve", "tests.unit.cli.graph:Nobody"], "Front, Worker"),
        (["serve", GRAPH, "-f", "/no/such/file.yaml"], "/no/such/file.yaml"),
        (["serve", GRAPH, "--Wroker.seed=1"], "did you mean Worker?"),
        (["serve", GRAPH, "--Worker.sede=1"], "did you mean seed?"),
        (["serve", GRAPH, "--Worker.seed=many"], "--Worker.seed"),
        (
            ["serve", GRAPH, "--Worker.ServiceArgs.workers=3"],
            "worker 3 of 3 of Worker needs 1 device, 0 of 2 CPU slots are free",
        ),
        (["serve", GRAPH, "--namespace", "a/b"], "namespace 'a/b' is not valid"),
        (["serve", GRAPH, "--nats-url", "http://x"], "not an address of a NATS server"),
        (["ps"], "no server runs; start one: dynamo serve MODEL"),
        (["stop"], "no server runs in namespace dynamo"),
        (["logs"], "none has left logs; start one"),
        (["logs", "Worker"], "none has left logs"),
        (["ps", "--namespace", "a_b"], "namespace 'a_b' is not valid"),
        (["role", "dynamo_Worker", "prefill"], "no server runs; start one: dynamo serve MODEL"),
        (["role", "dynamo_Worker", "frontend"], "'frontend' is not one of 'prefill', 'decode'"),
        (["role", "dynamo_Worker"], "ROLE is missing; the usage is `dynamo role [OPTIONS] WATCHER ROLE`"),
        (["role", "dynamo_Worker", "decode", "--namespace", "a_b"], "namespace 'a_b' is not valid"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(
    cli: Cli, root: Path, arguments: list[str], error: str
) -> None:
    port = [] if "--port" in arguments or "--host" in arguments or arguments[0] != "serve" else ["--port=0"]
    outcome = cli(*arguments, *port)
    assert outcome.code == 2, outcome
    assert outcome.error.startswith("error: ")
    assert outcome.error.count("\n") == 1
    assert error in outcome.error
    assert outcome.out == ""
    assert not root.exists()


def test_a_taken_port_is_named_before_anything_is_started(cli: Cli, root: Path, taken_port: int) -> None:
    outcome = cli("serve", GRAPH, "--port", str(taken_port))
    assert outcome.code == 2
    assert f"port {taken_port} on 127.0.0.1 is in use" in outcome.error
    assert not root.exists()


def test_a_second_server_is_refused(cli: Cli, root: Path) -> None:
    with ServerLock(StatePaths(root, "dynamo")):
        outcome = cli("serve", GRAPH, "--port=0")
    assert outcome.code == 2
    assert f"a server already runs in namespace dynamo (pid {os.getpid()})" in outcome.error


def test_a_dry_run_shows_watchers_devices_and_configuration(cli: Cli, root: Path) -> None:
    outcome = cli("serve", "--Worker.ServiceArgs.workers=2", GRAPH, "--Worker.seed=7", "--dry-run")
    assert outcome.code == 0
    lines = [line.split() for line in outcome.out.splitlines()]
    assert ["dynamo_Worker", "service", "0"] in [line[:3] for line in lines]
    assert ["dynamo_Worker_1", "service", "1"] in [line[:3] for line in lines]
    assert ["dynamo_Front", "service", "-"] in [line[:3] for line in lines]
    assert ["Worker", "seed", "7"] in lines
    assert "http://127.0.0.1:8000" in outcome.out
    assert not root.exists()


def test_a_dry_run_as_json_has_the_same(cli: Cli) -> None:
    outcome = cli("serve", GRAPH, "--dry-run", "--json", "--port=9000", "--namespace=other")
    plan = json.loads(outcome.out)
    assert [watcher["watcher"] for watcher in plan["watchers"]] == ["other_Worker", "other_Front"]
    assert plan["watchers"][0]["devices"] == [0]
    assert plan["watchers"][1]["environment"]["DYN_HTTP_PORT"] == "9000"
    assert plan["graph"]["namespace"] == "other"
    assert plan["device_kind"] == "cpu-slot"


def test_a_dry_run_hides_secrets(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_SERVER", "nats://hush@host")
    secrets = ("--Worker.api-key=hush", "--Worker.ServiceArgs.envs.HF_TOKEN=hush")
    for form in ([], ["--json"]):
        outcome = cli("serve", GRAPH, "--dry-run", *form, *secrets)
        assert outcome.code == 0, outcome
        assert "hush" not in outcome.out
        assert "nats://host:4222" in outcome.out


def test_the_logs_of_several_are_prefixed_and_of_one_are_not(cli: Cli, root: Path) -> None:
    logs = StatePaths(root, "dynamo").logs_dir
    logs.mkdir(parents=True)
    (logs / "dynamo_A.log").write_text("one\ntwo\n")
    (logs / "dynamo_B.log").write_text("three\n")
    (logs / "dynamo_Nats.log").write_text("noise\n")
    assert cli("logs").out == "A | one\nA | two\nB | three\n"
    assert cli("logs", "A", "-n", "1").out == "two\n"
    assert cli("logs", "Nats").out == "noise\n"


def test_following_ends_with_the_server(cli: Cli, root: Path) -> None:
    logs = StatePaths(root, "dynamo").logs_dir
    logs.mkdir(parents=True)
    (logs / "dynamo_A.log").write_text("one\n")
    assert cli("logs", "-f").out == "A | one\n"
