"""A `dynamo serve` in a process of its own, seen from outside: its lines, its processes, what it leaves."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from dynamo_local.process.ancestry import PARENT_PID_ENV
from dynamo_local.process.forkserver.protocol import IMPORTED_ENV
from scripts.in_processes.sitecustomize import note
from state.devices.inventory import CPU_SLOTS_VARIABLE, driver_present, usable_cores
from state.endpoints.board import read_board
from state.machine.processes import Process, ProcFs, kin
from state.paths import StatePaths
from state.statefile.leftovers import leftovers
from state.statefile.model import State
from state.statefile.store import StateStore

PATIENCE_S = 120.0
"""For whatever is waited for: a busy machine is slow, and slow is no failure."""
READY_WITHIN_S = 300.0
"""For a server whose frontend imports vLLM."""
TRACKERS_S = 5.0


IMPORTED_ANEW: list[str] = []
"""What fork servers of ended servers have said of an environment for which they have imported vLLM once more."""
_UNLIKE_TESTS = f"no fork from ${IMPORTED_ENV} (the fork server does not fork: its environment differs"


class ServerProcess:
    """Start with a command line; use as a context manager, which leaves no process behind.

    `environ`: by default that of this process. `imports`: its fork server imports vLLM for itself, even where a process
    that has done so is there to be forked (tests/imported.py).
    """

    def __init__(
        self,
        root: Path,
        namespace: str,
        arguments: list[str],
        cwd: Path | None = None,
        *,
        environ: Mapping[str, str] = os.environ,
        imports: bool = False,
    ) -> None:
        self.paths = StatePaths(root, namespace)
        self._temporary = tempfile.TemporaryDirectory(prefix="dyn")
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        repository = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (repository, environ.get("PYTHONPATH"))))
        environ = {
            **environ,
            "DYN_LOCAL_STATE_DIR": str(root),
            "PYTHONPATH": path,
            "PYTHONUNBUFFERED": "1",
            # What it leaves there when it is killed goes with the test.
            "TMPDIR": self._temporary.name,
        }
        if not driver_present():
            # Servers of other tests, and of others, may be on the same cores.
            environ.setdefault(CPU_SLOTS_VARIABLE, str(len(usable_cores())))
        # The last is set by an import of Ray in this process, and would have the server import vLLM anew.
        for name in ("NATS_SERVER", "NATS_TOKEN", "NATS_CA", "DYN_NAMESPACE", "RAY_CLIENT_MODE"):
            environ.pop(name, None)
        if imports:
            environ.pop(IMPORTED_ENV, None)
        environ[PARENT_PID_ENV] = str(os.getpid())
        self.environ: Mapping[str, str] = environ
        self._began: float | None = time.monotonic()
        self.process = subprocess.Popen(
            # Should the test run itself be killed, its servers go with it.
            [sys.executable, "-m", "dynamo_local.process.guarded", "--", sys.executable, *arguments],
            cwd=cwd or repository,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        # Not at once: resource trackers, which end by themselves, remove the shared memory of the dead first.
        ProcFs().end(self.processes(), TRACKERS_S, PATIENCE_S)
        self._temporary.cleanup()
        for log in self.paths.logs_dir.glob("*_ForkServer.log"):
            IMPORTED_ANEW.extend(line for line in log.read_text().splitlines() if _UNLIKE_TESTS in line)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def line(self, *parts: str, within_s: float = PATIENCE_S) -> str:
        """Wait for a line that contains all parts."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                line = self._queue.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty as error:
                raise AssertionError(f"no line with {parts} in time:\n{self.output}") from error
            if line is None:
                raise AssertionError(f"ended without a line with {parts}:\n{self.output}")
            self.lines.append(line)
            if self._began is not None and ("API ready at" in line or "all services ready" in line):
                note("server", name=self.paths.namespace, seconds=time.monotonic() - self._began)
                self._began = None
            if all(part in line for part in parts):
                return line

    def await_start(self) -> None:
        """Wait until all services are ready. Raises AssertionError, with all that the server has said, if they are not;
        then nothing of it is left."""
        try:
            self.line("all services ready")
        except BaseException:
            self.__exit__()
            raise

    def end(self, within_s: float = PATIENCE_S) -> int:
        """Wait for the process to end by itself; returns its exit code."""
        code = self.process.wait(within_s)
        while (line := self._queue.get(timeout=PATIENCE_S)) is not None:
            self.lines.append(line)
        return code

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def state(self) -> State:
        return StateStore(self.paths).read()

    def serves_all(self) -> bool:
        """Whether all endpoints are ready: by the file that frontends read, since each command that asks takes a second
        of CPU time from those that start."""
        board = read_board(self.paths)
        return (
            board is not None
            and len(board.endpoints) > 0
            and all(each.status.state == "ready" for each in board.endpoints)
        )

    def pid(self, service: str) -> int:
        """Pid in the statefile of the first process of a service, which is there soon after it was heard."""
        found: list[int] = []

        def look() -> bool:
            pid = self.state().components[f"{self.paths.namespace}_{service}"].pid
            found[:] = [] if pid is None else [pid]
            return pid is not None

        eventually(look, f"{service} has no process")
        return found[0]

    def processes(self) -> tuple[Process, ...]:
        """Every process that carries the marks of this server, children of services included."""
        return leftovers(self.paths, ProcFs().snapshot())

    def socket_directories(self) -> list[Path]:
        """Those that lie among temporary files, because its state lies too deep."""
        return list(Path(self._temporary.name).glob("dynamo-*"))

    def circusd_pid(self, within_s: float = PATIENCE_S) -> int:
        """circusd among the children of `dynamo serve`, which are more once one has died. Waits until there is
        one."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        found: list[int] = []

        def is_there() -> bool:
            found[:] = [int(pid) for pid in children.read_text().split() if _is_circusd(int(pid))]
            return bool(found)

        eventually(is_there, "there is no circusd", within_s)
        (circusd,) = found
        return circusd

    def assert_nothing_left(self) -> None:
        """No process, statefile, lock, runtime directory or socket."""
        assert self.processes() == ()
        assert self.socket_directories() == []
        assert [path.name for path in self.paths.root.iterdir() if not self.paths.is_kept(path)] == []
        assert self.paths.logs_dir.is_dir()


def parent_of(pid: int) -> int | None:
    """Pid of the process that started it; None if it has ended."""
    found = kin(pid)
    return None if found is None else found.parent


def _is_circusd(pid: int) -> bool:
    """Whether it is one, or about to become one."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False
    return command.startswith("circusd") or "dynamo_local.supervisor.circus.circusd\0" in command


def eventually(condition: Callable[[], bool], what: str, within_s: float = PATIENCE_S) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
