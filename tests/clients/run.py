"""Run a client's programs, as they stand in docs/guides/clients.md, against a server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from dynamo_local.core.errors import DynamoError
from tests.clients import nginx
from tests.clients.environments import Environment
from tests.clients.page import with_addresses
from tests.clients.recipes import Client

PROGRAM_WITHIN_S = 240.0
"""Time limit of a program, in seconds, long enough for a busy machine."""


@dataclass(frozen=True)
class Result:
    """The result of a client. `complaint`: why it failed; empty if it passed."""

    client: str
    version: str
    does: str
    seconds: float
    complaint: str

    @property
    def passed(self) -> bool:
        return not self.complaint


def run(client: Client, environment: Environment, page: Mapping[str, str], server: str, model: Path) -> Result:
    """Run all programs of a client, up to the first that fails. `server`: HOST:PORT."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"{client.name}-") as scratch, ExitStack() as stack:
        folder = Path(scratch)
        nginx_place = _free_place()
        for name in (*client.files, *client.programs):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(with_addresses(page[name], server, nginx_place))
        if environment.modules is not None:
            (folder / "node_modules").symlink_to(environment.modules)
        try:
            if client.behind_nginx:
                stack.enter_context(nginx.running(folder / "nginx.conf", nginx_place))
            complaint = _complaint(client, environment, folder, model)
        except DynamoError as error:
            complaint = str(error)
    return Result(client.name, environment.version, client.does, round(time.monotonic() - began, 1), complaint)


def _complaint(client: Client, environment: Environment, folder: Path, model: Path) -> str:
    for name in client.programs:
        code, output = _run_program(_command(environment, name), folder, _environ(environment, folder, model))
        if code != 0:
            return f"{name} ended with {code}:\n" + "\n".join(output.splitlines()[-25:])
    return ""


def _command(environment: Environment, name: str) -> list[str]:
    interpreters = {
        ".py": [str(environment.programs / "python")],
        ".mjs": ["node"],
        ".sh": ["bash", "-euo", "pipefail"],
    }
    return [*interpreters[Path(name).suffix], name]


def _environ(environment: Environment, folder: Path, model: Path) -> dict[str, str]:
    """Return a minimal environment for a program: without keys, proxies and PYTHONPATH of this process."""
    return {
        "PATH": f"{environment.programs}:{os.environ['PATH']}",
        "HOME": str(folder),
        "LANG": "C.UTF-8",
        "TOKENIZER": str(model),
        # Clients must not look up models or prices in the network.
        "HF_HUB_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


def _run_program(command: list[str], folder: Path, environ: Mapping[str, str]) -> tuple[int, str]:
    """Run a program, and return its exit code and output. At the time limit it is killed with its children."""
    program = subprocess.Popen(
        command,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = program.communicate(timeout=PROGRAM_WITHIN_S)
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        output, _ = program.communicate()
        output += f"\nnot finished after {PROGRAM_WITHIN_S:g} s"
    return program.returncode, output


def _free_place() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
