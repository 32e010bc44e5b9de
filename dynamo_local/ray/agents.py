"""Each node server is the child of an actor of its node, the agent.

Agents are detached, take no resource, and are named after their node. Ray does not restart one: the node server dies
with its agent, and the next is started by who misses it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnschedulableError, GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dynamo_local.core.errors import NodeStartError, SupervisorError
from dynamo_local.ray.connection import ray_errors
from dynamo_local.supervisor.node.agent import SERVER_WITHIN_S, NodeAgent

_AGENT_WITHIN_S = 20.0
_LOOK_S = 0.05


def start_node(node: str, program: Sequence[str], order: bytes) -> None:
    """Have the node server run there. Raises NodeStartError, with the last line of its log, if it ends at once; its
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
        raise NodeStartError(f"no node server runs on node {node}: {error}")


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
