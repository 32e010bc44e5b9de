"""A Ray cluster (supervisor/places/cluster.py): each method is one of Ray's blocking calls, or some, in a thread."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from ray.experimental import internal_kv

from dynamo_local.core.errors import SupervisorError
from dynamo_local.ray import agents
from dynamo_local.ray.connection import join, ray_errors
from dynamo_local.ray.groups import Groups
from dynamo_local.supervisor.places.cluster import ClusterNode, Slot
from dynamo_local.supervisor.places.port import Need

_T = TypeVar("_T")

_WITHIN_S = 15.0
_JOINED_WITHIN_S = 40.0
_SLOW_WITHIN_S = 150.0
"""Longer than the deadlines of groups.py and agents.py, so that their errors are heard."""


@dataclass
class RayCluster:
    """The cluster as one graph sees it (cluster.Cluster). `program`: the node server, as arguments of Python."""

    groups: Groups
    notebook: Notebook
    program: Sequence[str] = ("-m", "dynamo_local.supervisor.node")
    _late: dict[str, Future[Any]] = field(default_factory=dict, init=False)
    """Calls that nobody waits for any more, by the name that they are about."""

    @classmethod
    async def connect(cls, namespace: str, address: str | None) -> RayCluster:
        """Join a cluster that is there: of the head at `address`, or None: the one of this machine or $RAY_ADDRESS.
        Never starts one. Raises UsageError if there is none, or one of other versions."""
        cluster = cls(Groups(namespace), Notebook(namespace))
        await cluster._call("its head", join, namespace, address, within_s=_JOINED_WITHIN_S)
        # Ray writes a stack at each SIGTERM before this process's own handler has it: that is set again.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        return cluster

    async def notes(self) -> Mapping[str, bytes]:
        return await self._call("notes", self.notebook.notes)

    async def add_note(self, name: str, data: bytes) -> bool:
        return await self._call(f"add {name}", self.notebook.add, name, data)

    async def remove_note(self, name: str) -> None:
        await self._call(f"remove {name}", self.notebook.remove, name)

    async def nodes(self) -> Mapping[str, ClusterNode]:
        return await self._call("nodes", self.groups.nodes)

    async def reserve(self, name: str, need: Need, avoid: Collection[str] = ()) -> Slot:
        return await self._call(f"reserve {name}", self.groups.reserve, name, need, avoid, within_s=_SLOW_WITHIN_S)

    async def release(self, name: str) -> None:
        await self._call(f"release {name}", self.groups.release, name)

    async def reservations(self) -> Mapping[str, Slot]:
        return await self._call("reservations", self.groups.reservations, within_s=_SLOW_WITHIN_S)

    async def start_node(self, node: str, order: bytes) -> None:
        what = f"start node {node}"
        await self._call(what, agents.start_node, node, self.program, order, within_s=_SLOW_WITHIN_S)

    async def end_node(self, node: str) -> None:
        await self._call(f"end node {node}", agents.end_node, node, within_s=_SLOW_WITHIN_S)

    async def close(self) -> None:
        await self._call("shutdown", ray.shutdown)

    async def _call(self, what: str, work: Callable[..., _T], *arguments: Any, within_s: float = _WITHIN_S) -> _T:
        """The result of `work`, or its error. A thread that waits for ever keeps neither this process nor others.
        `what`: its last word is the name that it is about. Of one name a call that was given up ends before the next
        begins: it would do late what is wanted no more, and threads would pile up."""
        done: Future[_T] = Future()
        done.set_running_or_notify_cancel()

        def run() -> None:
            try:
                done.set_result(work(*arguments))
            except Exception as error:  # noqa: BLE001 - it is raised where the result is awaited
                done.set_exception(error)

        name = what.rpartition(" ")[2]
        try:
            async with asyncio.timeout(within_s):
                while late := self._late.get(name):
                    await asyncio.gather(asyncio.wrap_future(late), return_exceptions=True)
                    self._late.pop(name, None)
                threading.Thread(target=run, name=f"ray: {what}", daemon=True).start()
                try:
                    return await asyncio.wrap_future(done)
                finally:
                    if not done.done():
                        self._late[name] = done
        except TimeoutError as error:
            raise SupervisorError(f"Ray has not answered within {within_s:g} s: {what}", "see `ray status`") from error


# Notes in the key-value table of Ray's head: an entry is made only if there is none of its name.

_TABLE = "dynamo"


@dataclass(frozen=True)
class Notebook:
    """The notes of a namespace (cluster.Cluster)."""

    namespace: str

    def notes(self) -> dict[str, bytes]:
        with ray_errors("tell its notes"):
            keys = [key.decode() for key in internal_kv._internal_kv_list(self._key(""), namespace=_TABLE)]
            found = {key: internal_kv._internal_kv_get(key, namespace=_TABLE) for key in keys}
        return {key.removeprefix(self._key("")): data for key, data in found.items() if data is not None}

    def add(self, name: str, data: bytes) -> bool:
        with ray_errors(f"note {name}"):
            # True where there is one already.
            return not internal_kv._internal_kv_put(self._key(name), data, overwrite=False, namespace=_TABLE)

    def remove(self, name: str) -> None:
        with ray_errors(f"remove {name}"):
            internal_kv._internal_kv_del(self._key(name), namespace=_TABLE)

    def _key(self, name: str) -> str:
        return f"{self.namespace}/{name}"
