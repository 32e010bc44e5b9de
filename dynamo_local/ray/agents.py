"""Each node server is the child of an actor of its node, the agent.

Agents are detached, take no resource, and are named after their node. Ray does not restart one: the node server dies
with its agent, and the next is started by who misses it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnschedulableError, GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dynamo_local.core.errors import SupervisorError
from dynamo_local.process.ancestry import PARENT_PID_ENV
from dynamo_local.ray.connection import ray_errors

SERVER_WITHIN_S = 60.0
"""For a node server to be ready, and to end with its workers. It is killed then."""

_AGENT_WITHIN_S = 20.0
_LOOK_S = 0.05

_DROPPED = ("RAY_", "OMP_", "CUDA_")
"""Variables that Ray sets for its own workers: they would hide all GPUs, and bind all threads to one core."""


def start_node(node: str, program: Sequence[str], order: bytes) -> None:
    """Have the node server run there. Raises SupervisorError, with the last line of its log, if it ends at once; its
    agent is gone then."""
    with ray_errors(f"start an agent on node {node}"):
        try:
            error = _answer(node, program, order)
        except ActorUnschedulableError as gone:
            raise SupervisorError(f"node {node} has left the Ray cluster", "try again") from gone
        except GetTimeoutError:
            error = "it was not ready in time"
    if error is not None:
        end_node(node)
        raise SupervisorError(f"no node server runs on node {node}: {error}")


def end_node(node: str) -> None:
    """End the node server there in order, and its agent."""
    with ray_errors(f"end the agent on node {node}"):
        if (agent := _agent_of(node)) is None:
            return
        # An agent ends with its node server: it may not answer any more.
        with suppress(RayActorError, ActorUnschedulableError, GetTimeoutError):
            ray.get(agent.end.remote(), timeout=SERVER_WITHIN_S + _AGENT_WITHIN_S)
        ray.kill(agent)
        until = time.monotonic() + _AGENT_WITHIN_S
        while _agent_of(node) is not None:
            if time.monotonic() > until:
                raise SupervisorError(f"the agent on node {node} does not end", "see `ray status`")
            time.sleep(_LOOK_S)


def _answer(node: str, program: Sequence[str], order: bytes) -> str | None:
    """The answer of an agent that was told to start the node server. One that is just ending is followed by another."""
    where = NodeAffinitySchedulingStrategy(node, soft=False)
    options = {"name": _name(node), "get_if_exists": True, "lifetime": "detached", "num_cpus": 0}
    until = time.monotonic() + _AGENT_WITHIN_S
    while True:
        try:
            agent = ray.remote(NodeAgent).options(**options, scheduling_strategy=where).remote(list(program))
            error: str | None = ray.get(agent.start.remote(order), timeout=SERVER_WITHIN_S + _AGENT_WITHIN_S)
            return error
        except ActorDiedError:
            if time.monotonic() > until:
                raise
            time.sleep(_LOOK_S)


def _agent_of(node: str) -> Any | None:
    try:
        return ray.get_actor(_name(node))
    except ValueError:
        return None


def _name(node: str) -> str:
    return f"node/{node}"


class NodeAgent:
    """The actor: runs one node server, which dies with it; and it ends with the node server. `program`: arguments of
    Python.

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
        child = subprocess.Popen(
            # The parent of an actor is the raylet. One that was killed and is not reaped looks alive to Ray.
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
        """Pass on what the child writes to the log that Ray keeps of this actor, until the child has ended."""
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


def child_environment(environ: Mapping[str, str], paths: Iterable[str]) -> dict[str, str]:
    """The environment of a node server: this process's, without what is Ray's, and with the folders in `paths` from
    which this process imports beyond its installation, such as the working directory of a job."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_DROPPED)}
    installed = (sys.prefix, sys.base_prefix)
    own = [path for path in paths if path and not path.startswith(installed) and Path(path).is_dir()]
    return kept | ({"PYTHONPATH": os.pathsep.join(dict.fromkeys(own))} if own else {})
