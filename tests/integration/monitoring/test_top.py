"""`dynamo top` on a real server with mockers, on a real terminal and without one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.server_process import PATIENCE_S, ServerProcess, eventually
from tests.integration.terminal import Terminal

pytestmark = pytest.mark.integration

COMMAND = [sys.executable, "-m", "dynamo_local.cli.main"]
LEAVES_THE_SCREEN = b"\x1b[?1049l"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("state")
    serve = ["-m", "dynamo_local.cli.main", "serve", "tests.integration.supervisor.roles_graph:Front"]
    engines = ["--VllmWorker.engine=mocker", "--PrefillWorker.engine=mocker"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DYN_CPU_SLOTS", "2")
        with ServerProcess(root, "top", [*serve, "--namespace=top", "--port=0", *engines]) as server:
            server.line("all services ready")
            yield server
            server.signal(signal.SIGTERM)
            server.end()


class TopTerminal(Terminal):
    def __init__(self, server: ServerProcess, *arguments: str) -> None:
        super().__init__([*COMMAND, *arguments], {**server.environ, "DYN_NAMESPACE": "top"})

    def shows(self, *parts: bytes) -> None:
        eventually(lambda: all(part in self.written for part in parts), f"not shown: {parts}")


def once(server: ServerProcess, *arguments: str) -> str:
    done = subprocess.run(
        [*COMMAND, "top", *arguments, "--namespace=top"],
        env=dict(server.environ),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_json_has_every_process_and_what_it_says(server: ServerProcess) -> None:
    everybody = {
        "top_Front": ("frontend", "ready"),
        "top_PrefillWorker": ("prefill", "ready"),
        "top_VllmWorker": ("decode", "ready"),
    }
    found: dict[str, Any] = {}

    def complete() -> bool:
        """Processes without a presence for two seconds are not shown."""
        found.update(json.loads(once(server, "--json")))
        rows = (*found["workers"], *found["processes"])
        rates = [row["tokens_per_s"] for row in found["workers"]]
        heard = {row["watcher"]: (row["role"], row["state"]) for row in rows} == everybody
        return heard and rates == [0, 0] and found["queue"] is not None

    eventually(complete, "not all is shown")
    assert found["namespace"] == "top"
    assert all(row["age_s"] > 0 for row in found["workers"])
    assert found["queue"] == {"waiting": 0, "in_hand": 0}
    assert found["frontend"] is None
    assert found["planner"] is None


def test_without_a_terminal_it_is_shown_once_as_text(server: ServerProcess) -> None:
    def ready() -> bool:
        shown = once(server)
        assert "\x1b" not in shown
        assert max(map(len, shown.splitlines())) <= 80
        workers = [line.split()[:3] for line in shown.splitlines() if line.startswith("VllmWorker")]
        return workers == [["VllmWorker", "decode", "ready"]]

    eventually(ready, "the worker is not shown")


def test_on_a_terminal_it_lives_until_q_and_leaves_everything_as_it_was(server: ServerProcess) -> None:
    with TopTerminal(server, "top") as terminal:
        terminal.shows(b"PrefillWorker", b"VllmWorker", b"prefill queue")
        drawn = len(terminal.written)
        eventually(lambda: len(terminal.written) > drawn, "it is not drawn again")
        terminal.type(b"x")
        assert terminal.process.poll() is None
        terminal.type(b"q")
        assert terminal.process.wait(PATIENCE_S) == 0
        terminal.shows(LEAVES_THE_SCREEN)
        assert termios.tcgetattr(terminal.theirs) == terminal.before


def test_an_interrupt_ends_it_as_well(server: ServerProcess) -> None:
    with TopTerminal(server, "top") as terminal:
        terminal.shows(b"VllmWorker")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(PATIENCE_S) == 0
        terminal.shows(LEAVES_THE_SCREEN)
        assert termios.tcgetattr(terminal.theirs) == terminal.before


def test_without_a_server_it_says_so_in_one_line(tmp_path: Path, server: ServerProcess) -> None:
    done = subprocess.run(
        [*COMMAND, "top", "--namespace=nobody"],
        env=dict(server.environ),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.startswith("error: no server runs in namespace nobody")
    assert done.stderr.count("\n") == 1
