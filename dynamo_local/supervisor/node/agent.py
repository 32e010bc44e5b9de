"""Runs a node server as the child of an actor, for clusters that have actors. Imports little: it starts fast."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dynamo_local.process.ancestry import PARENT_PID_ENV

SERVER_WITHIN_S = 60.0
"""For a node server to be ready, and to end with its workers. It is killed then."""

_CLUSTERS = ("RAY_", "OMP_", "CUDA_VISIBLE_")
"""What Ray sets for its own workers: it would hide all GPUs, and bind all threads to one core."""


class NodeAgent:
    """An actor of the cluster, alone in its process: runs one node server, which dies with it; and it ends with the
    node server. `program`: arguments of Python.

    Its methods run on the main thread, one at a time: a child is told of the death of the thread that has forked it.
    """

    def __init__(self, program: Sequence[str]) -> None:
        self._program = program
        self._child: subprocess.Popen[bytes] | None = None
        self._last_line = "it has ended without a word"
        self._told = threading.Event()
        self._is_ready = False

    def start(self, order: bytes) -> str | None:
        """Start the node server, and wait until it is ready. Harmless if it runs. Returns the last line of its log if
        it could not."""
        if self._child is None:
            self._child = self._launched(order)
        self._told.wait(SERVER_WITHIN_S)
        return None if self._is_ready else self._last_line

    def end(self) -> None:
        """End the node server in order, and kill it when it takes longer."""
        if self._child is None:
            return
        self._child.terminate()
        try:
            self._child.wait(SERVER_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _launched(self, order: bytes) -> subprocess.Popen[bytes]:
        _take_priority_of(os.getppid())
        child = subprocess.Popen(
            # The parent is the cluster's process on the node, such as the raylet. One that was killed and is not
            # reaped looks alive to its actors.
            [sys.executable, *self._program, "--watch-pid", str(os.getppid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=child_environment(os.environ, sys.path) | {PARENT_PID_ENV: str(os.getpid())},
            start_new_session=True,
        )
        threading.Thread(target=self._follow, args=(child,), daemon=True).start()
        assert child.stdin is not None
        # If it has ended, its log says why.
        with suppress(BrokenPipeError), child.stdin as stdin:
            stdin.write(order)
        return child

    def _follow(self, child: subprocess.Popen[bytes]) -> None:
        """Pass on what the child writes to the log that the cluster keeps of this actor, until the child has ended."""
        assert child.stdout is not None
        for line in child.stdout:
            text = line.decode(errors="replace").rstrip()
            if text == "ready":
                self._is_ready = True
                self._told.set()
            elif text:
                self._last_line = text.removeprefix("error: ")
                print(text, file=sys.stderr, flush=True)
        if self._is_ready:
            # Without a node server an agent is of no use, and would keep an autoscaler from removing the node.
            child.wait()
            os._exit(0)
        self._told.set()


def _take_priority_of(pid: int) -> None:
    """Give this thread, and what it starts, the priority of that process, where this process may have it. Ray gives its
    workers less than all else on the node has: where others compute, a node server would take many seconds to start."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, pid))


def child_environment(environ: Mapping[str, str], paths: Iterable[str]) -> dict[str, str]:
    """The environment of a node server: this process's, without what is the cluster's, and with the folders in `paths`
    from which this process imports beyond its installation, such as the working directory of a job."""
    installed = (sys.prefix, sys.base_prefix)
    own = [path for path in paths if path and not path.startswith(installed) and Path(path).is_dir()]
    return without_cluster(environ) | ({"PYTHONPATH": os.pathsep.join(dict.fromkeys(own))} if own else {})


def without_cluster(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what a cluster sets for the process that starts a node server: a worker's devices and
    threads are this server's to choose."""
    return {name: value for name, value in environ.items() if not name.startswith(_CLUSTERS)}
