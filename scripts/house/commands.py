"""Compares what commands print and return with those of another revision, on servers in the same states.

    python -m scripts.house.commands CHECKOUT        # a clone of that revision with its own .venv (make setup)

Each command that docs/reference/cli.md lists is run without a server, on a server of mockers with two workers, an
endpoint and keys, and after that server was killed: as text and as JSON where it has that. What differs from run to run
(pids, ids, times, ports, folders) is replaced by a sign first. Ends with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVE = "serve random --workers 2 --VllmWorker.engine=mocker --cpu-slots 4 --port 0 --namespace house"
WITHIN_S = 180

LOOKS = (
    *("ls", "ls --json", "ps", "ps --json", "describe VllmWorker", "describe VllmWorker --json", "describe chat"),
    *("describe chat --json", "describe nothing", "requests", "requests --json", "route hello", "route hello --json"),
    *("usage", "usage --json", "usage --csv", "queue ls", "queue ls --json", "queue purge --yes", "config get"),
    *("config get --json", "config get unknown", "key list", "key list --json", "endpoint list"),
    *("endpoint list --json", "endpoint get chat", "endpoint get chat --json", "endpoint get nothing", "batch list"),
    *("batch list --json", "batch show nothing", "task list", "task list --json", "task show nothing", "task secret"),
    *("logs nothing", "events --kind key --json", "completion bash", "doctor --json"),
)
"""Commands that change nothing."""
MISTAKES = (
    *("scale VllmWorker=x", "scale Nothing=2", "drain Nothing", "restart Nothing", "role Nothing prefill"),
    *(
        "role VllmWorker prefill",
        "migrate nothing",
        "migrate --from Nothing",
        "key rotate nothing",
        "key revoke nothing",
    ),
    *("key create A_b", "endpoint create X!", "endpoint delete nothing --yes", "endpoint park nothing"),
    *("endpoint wake nothing", "endpoint update nothing --gpu 2", "config set unknown 1", "batch cancel nothing"),
    *("task cancel nothing", "load compare nothing nothing", "wait --timeout 0.5 --endpoint nothing"),
)
"""Commands that are refused, on a server that runs as well."""
KEYS = (
    "key create alice --json",
    "key create boss --admin --expires 30d",
    "key rotate alice --json",
    "key list --json",
)
CHANGES = (
    *("endpoint create chat --model random --engine mocker --json", "endpoint update chat --label a=b"),
    *("endpoint create chat --model random", "scale VllmWorker=3", "scale VllmWorker=2 --json", "scale chat=1"),
    *(
        "restart VllmWorker --json",
        "drain VllmWorker_1",
        "migrate --from VllmWorker --json",
        "config set max-local-prefill-length 5",
    ),
    *("config get --json", "endpoint park chat --json", "endpoint wake chat", "rotate-token --json", "wait --json"),
    *("key revoke alice --json", "key revoke boss", "key revoke boss --open", "endpoint delete chat --yes --json"),
)
"""Commands that change a server that runs, in their order."""
SIGNS: tuple[tuple[str, str], ...] = (
    (r"dyn-[\w-]{20,}|whsec_[\w+/=]+", "SECRET"),
    (r"\b[0-9a-f]{16,64}\b", "ID"),
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?([+-]\d\d:\d\d|Z)?", "TIME"),
    (r"\b\d\d:\d\d:\d\d\b", "TIME"),
    (r"127\.0\.0\.1:\d+", "ADDRESS"),
    (r"\b\d+(\.\d+)? ?(ms|s|min|h|GiB|MiB|%)\b", "AMOUNT"),
    (r"\b\d+\.\d+\b", "NUMBER"),
    (r"\b\d{3,}\b", "NUMBER"),
)
"""Pattern -> what stands for it."""


@dataclass(frozen=True)
class Printed:
    """What a command has printed, and its exit code."""

    code: int
    out: str
    err: str

    def lines(self) -> list[str]:
        return [f"exit code {self.code}", *self.out.splitlines(), "-- on standard error --", *self.err.splitlines()]


class Revision:
    """A checkout whose commands are run, with a state folder of its own."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        self._checkout = checkout
        self._folder = folder
        self._environ = {**os.environ, "DYN_LOCAL_STATE_DIR": str(folder / "state"), "DYN_NAMESPACE": "house"}

    def run(self, command: str) -> Printed:
        """Run a command until it ends."""
        done = subprocess.run(
            [str(self._checkout / ".venv/bin/dynamo"), *command.split()],
            cwd=self._checkout,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        return Printed(done.returncode, self._signed(done.stdout), self._signed(done.stderr))

    def serve(self) -> subprocess.Popen[bytes]:
        """Start a server, and wait until it is ready."""
        log = (self._folder / "serve.log").open("wb")
        server = subprocess.Popen(
            [str(self._checkout / ".venv/bin/dynamo"), *SERVE.split()],
            cwd=self._checkout,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        waited = self.run(f"wait --timeout {WITHIN_S - 20}")
        if waited.code != 0:
            server.kill()
            raise SystemExit(f"the server of {self._checkout} is not ready: {waited.err}")
        return server

    def _signed(self, text: str) -> str:
        for folder, sign in ((self._folder, "FOLDER"), (self._checkout, "CHECKOUT")):
            text = text.replace(str(folder), sign)
        for pattern, sign in SIGNS:
            text = re.sub(pattern, sign, text)
        # Columns are as wide as what is in them.
        return re.sub(r" {2,}|-{4,}", "  ", text)


def run_all(revision: Revision) -> Iterator[tuple[str, Printed]]:
    """Run all commands in all states, and yield each with its state and what it has printed."""
    for command in (*LOOKS, *MISTAKES, *KEYS, *CHANGES[:6], "stop"):
        yield f"no server: {command}", revision.run(command)
    server = revision.serve()
    try:
        for command in (*CHANGES[:2], *KEYS, *LOOKS, *MISTAKES, *CHANGES[2:], *LOOKS):
            yield f"running: {command}", revision.run(command)
        server.send_signal(signal.SIGKILL)
        server.wait()
        for command in ("ls --json", "ps", "key list", "endpoint list", "scale VllmWorker=1", "stop", "ls"):
            yield f"killed: {command}", revision.run(command)
    finally:
        revision.run("stop")
        if server.poll() is None:
            server.kill()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="clone of the revision to compare with, set up by `make setup`")
    options = parser.parse_args(arguments)
    differing = 0
    with tempfile.TemporaryDirectory(prefix="house-") as scratch:
        folders = [Path(scratch, name) for name in ("before", "now")]
        for folder in folders:
            folder.mkdir()
        both = [
            Revision(checkout, folder)
            for checkout, folder in zip((options.checkout.resolve(), ROOT), folders, strict=True)
        ]
        before = [*run_all(both[0])]
        for (title, printed), (_, now) in zip(before, run_all(both[1]), strict=True):
            lines = [*difflib.unified_diff(printed.lines(), now.lines(), "before", "now", lineterm="", n=0)]
            differing += bool(lines)
            print("\n".join([title, *lines[2:], ""]) if lines else f"{title}: the same", flush=True)
    print(f"{differing} of {len(before)} differ")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
