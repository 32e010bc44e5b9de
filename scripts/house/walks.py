"""Count the product's files and functions that one action enters, in all processes of a running server.

`python -m scripts.house.walks CHECKOUT`: CHECKOUT is a clone with its own .venv (`make setup`), and is changed: use one
to throw away.

A start-up hook in the clone's .venv traces each process (sys.setprofile, between two signals) of a server with two real
vLLM workers of the model `random` behind a router, during: one streamed chat request of 8 tokens, a scale-down, a
scale-up, a migration. Processes that start meanwhile count whole, the command line included. What happens anyway while
the server is idle is left out. Code in threads that exist already is not seen.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HOOK = r"""
import atexit, json, os, signal, sys, threading
if os.path.exists(CONFIG):
    OUT, ROOT = json.load(open(CONFIG))
    seen = {}
    def prof(frame, event, arg):
        if event == "call":
            code = frame.f_code
            name = code.co_filename
            if name.startswith(ROOT) and "/.venv/" not in name:
                key = (name[len(ROOT) + 1:], code.co_qualname)
                seen[key] = seen.get(key, 0) + 1
    def start(*_):
        seen.clear(); threading.setprofile(prof); sys.setprofile(prof)
    def stop(*_):
        sys.setprofile(None); threading.setprofile(None)
        if seen and os.path.isdir(OUT):
            with open(f"{OUT}/{os.getpid()}.json", "w") as f:
                json.dump([[file, function, n] for (file, function), n in seen.items()], f)
            seen.clear()
    signal.signal(signal.SIGUSR1, start); signal.signal(signal.SIGUSR2, stop)
    if os.path.exists(f"{OUT}/on"):  # a process that starts during the action, the command line included
        start(); atexit.register(stop)
"""
_NAMES = ("walkhook.py", "walkhook.pth", "walkhook.json")
_START_WITHIN_S, _END_WITHIN_S, _COMMAND_S, _ANSWER_S = 180, 60, 180, 120
_SETTLED_S, _WRITTEN_S, _IDLE_S = 0.3, 1.0, 6.0
_MIGRATED_TOKENS, _RUNS_S = 600, 0.7
"""Of the request that migrates: how long it is, and for how long it has run by then."""

Call = tuple[str, str, str]
"""A process (its pid), and a file and function that it entered."""


@dataclass(frozen=True)
class Walk:
    """What one action entered. `calls`: how often, in all."""

    files: tuple[str, ...]
    functions: tuple[str, ...]
    calls: int


class Tracer:
    """Traces the Python processes of a checkout while something happens."""

    def __init__(self, root: Path, out: Path) -> None:
        self._root, self._out = root, out
        self._idle: set[Call] = set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have each process of the checkout's .venv that starts within the context obey the two signals."""
        python, told = self._root / ".venv/bin/python", "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = Path(subprocess.run([python, "-c", told], capture_output=True, text=True, check=True).stdout.strip())
        hook, start, config = (site / name for name in _NAMES)
        try:
            config.write_text(json.dumps([str(self._out), str(self._root)]))
            hook.write_text(f"CONFIG = {str(config)!r}\n{_HOOK}")
            start.write_text("import walkhook\n")
            yield
        finally:
            for each in (hook, start, config):
                each.unlink(missing_ok=True)

    def learn_idle(self, rounds: int) -> None:
        """Note what happens anyway, and leave it out from now on."""
        for _ in range(rounds):
            self._idle |= self._during(lambda: time.sleep(_IDLE_S)).keys()

    def walk(self, action: Callable[[], object]) -> Walk:
        """Trace an action."""
        found = {call: n for call, n in self._during(action).items() if call not in self._idle and call[2][0] != "<"}
        files = {file for _, file, _ in found}
        functions = {f"{file}:{function}" for _, file, function in found}
        return Walk(tuple(sorted(files)), tuple(sorted(functions)), sum(found.values()))

    def _during(self, action: Callable[[], object]) -> dict[Call, int]:
        for path in self._out.glob("*.json"):
            path.unlink()
        self._send(signal.SIGUSR1)
        (self._out / "on").touch()
        time.sleep(_SETTLED_S)
        action()
        time.sleep(_SETTLED_S)
        (self._out / "on").unlink()
        self._send(signal.SIGUSR2)
        time.sleep(_WRITTEN_S)
        told = [(path.stem, *line) for path in self._out.glob("*.json") for line in json.loads(path.read_text())]
        return {(pid, file, function): n for pid, file, function, n in told}

    def _send(self, number: signal.Signals) -> None:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    if self._obeys(entry):
                        os.kill(int(entry.name), number)

    def _obeys(self, process: Path) -> bool:
        """Whether it is a Python process of the checkout that has the hook: the signals would end any other one."""
        if "python" not in str((process / "exe").readlink()):
            return False
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        caught = int(status["SigCgt"], 16)
        obeys = all(caught >> (number - 1) & 1 for number in (signal.SIGUSR1, signal.SIGUSR2))
        return obeys and str(self._root) in (process / "maps").read_text() + str((process / "cwd").readlink())


class Server:
    """`dynamo serve` of a checkout, with two workers."""

    def __init__(self, root: Path, state: str) -> None:
        self._dynamo = str(root / ".venv/bin/dynamo")
        self._environ = {**os.environ, "DYN_LOCAL_STATE_DIR": state, "DYN_NAMESPACE": "walks"}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        serve = ["serve", "examples.llm.graphs.agg_router:Frontend", "-f", "examples/llm/configs/agg_router.yaml"]
        serve += ["--Common.model=random", "--VllmWorker.ServiceArgs.workers=2", f"--port={port}"]
        with Path(state, "serve.log").open("wb") as log:
            self._process = subprocess.Popen(
                [self._dynamo, *serve], cwd=root, env=self._environ, stdout=log, stderr=subprocess.STDOUT
            )

    def wait(self) -> None:
        """Wait until it answers. Raises TimeoutError."""
        for _ in range(_START_WITHIN_S):
            with suppress(OSError), urllib.request.urlopen(f"{self._url}/health", timeout=2):
                return
            time.sleep(1)
        raise TimeoutError(f"the server is not ready after {_START_WITHIN_S} s")

    def end(self) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait(_END_WITHIN_S)

    def chat(self, tokens: int = 8) -> None:
        """A streamed request."""
        message = {"role": "user", "content": "hello there"}
        body = {"model": "random", "messages": [message], "max_tokens": tokens, "stream": True}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self._url}/v1/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            answer.read()

    def command(self, *arguments: str) -> str:
        """What a command prints."""
        command = [self._dynamo, *arguments]
        asked = subprocess.run(
            command, env=self._environ, capture_output=True, text=True, timeout=_COMMAND_S, check=True
        )
        return str(asked.stdout)

    def migrate(self) -> None:
        """A request that migrates while it runs."""
        asking = threading.Thread(target=self.chat, args=(_MIGRATED_TOKENS,))
        asking.start()
        time.sleep(_RUNS_S)
        (request, *_) = json.loads(self.command("requests", "--json"))["requests"]
        self.command("migrate", request["request"])
        asking.join()


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m scripts.house.walks", description=__doc__, formatter_class=formatter
    )
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="clone with its own .venv, to throw away")
    parser.add_argument("--rounds", type=int, default=3, help="of each action; medians are shown (3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the names of files and functions")
    options = parser.parse_args(arguments)
    walks = measure(options.checkout.resolve(), options.rounds)
    for name, found in walks.items():
        print(_told(name, found), flush=True)
    if options.json:
        options.json.write_text(json.dumps({name: _middle(found) for name, found in walks.items()}, indent=1))
    return 0


def measure(root: Path, rounds: int) -> dict[str, list[Walk]]:
    """Trace each action so many times."""
    found: dict[str, list[Walk]] = {}
    with tempfile.TemporaryDirectory() as out, tempfile.TemporaryDirectory() as state:
        tracer = Tracer(root, Path(out))
        with tracer.installed():
            server = Server(root, state)
            try:
                server.wait()
                for _ in range(2):
                    server.chat()
                time.sleep(_IDLE_S)
                tracer.learn_idle(3)
                for _ in range(rounds):
                    for name, action in _actions(server).items():
                        found.setdefault(name, []).append(tracer.walk(action))
            finally:
                server.end()
    return found


def _actions(server: Server) -> dict[str, Callable[[], object]]:
    return {
        "chat, 8 tokens": server.chat,
        "scale down": lambda: server.command("scale", "VllmWorker=1"),
        "scale up": lambda: server.command("scale", "VllmWorker=2"),
        "migration with its request": server.migrate,
    }


def _told(name: str, found: Sequence[Walk]) -> str:
    files, functions, calls = map(
        statistics.median,
        zip(*((len(walk.files), len(walk.functions), walk.calls) for walk in found), strict=True),
    )
    return f"{name}: {files:.0f} files, {functions:.0f} functions, {calls:.0f} calls (medians of {len(found)})"


def _middle(found: Iterable[Walk]) -> dict[str, Any]:
    """The names of the round in the middle."""
    ordered = sorted(found, key=lambda walk: (len(walk.files), len(walk.functions)))
    return vars(ordered[len(ordered) // 2])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
