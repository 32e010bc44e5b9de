"""Reservations are detached placement groups `dynamo/NAMESPACE/WATCHER` of one bundle.

An actor in each bundle with GPUs holds them: it alone is told their ids, and `ray status` counts as used what an actor
holds. Bundles of cores have none; `ray status` shows them as reserved.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from contextlib import ExitStack

import ray
from ray._private.state import available_resources_per_node
from ray.util import placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dynamo_local.core.errors import DeviceError, SupervisorError
from dynamo_local.ray.connection import ray_errors
from dynamo_local.ray.placing import GPU, Group, RayNode, bundle_of, choose, counted, lacking, resource_of
from dynamo_local.supervisor.places.cluster import ClusterNode, Slot
from dynamo_local.supervisor.places.port import Need

_PREFIX = "dynamo/"
_NODE_LABEL = "ray.io/node-id"

_READY_WITHIN_S = 5.0
"""For a group on a node that has room for it: some milliseconds. Others may have been faster."""

_SETTLES_S = 0.5
"""For Ray's count of what is available to show what was given back (0.1 s)."""

_DONE_WITHIN_S = 30.0
_LOOK_S = 0.05


class DeviceKeeper:
    """The actor that holds the GPUs of its bundle, by being there."""

    def devices(self) -> list[str]:
        """Their ids on this node."""
        return [str(number) for number in ray.get_runtime_context().get_accelerator_ids()[GPU]]


class Groups:
    """The reservations of a graph."""

    def __init__(self, namespace: str) -> None:
        self._mine = f"{_PREFIX}{namespace}/"
        self._reserving = threading.Lock()
        self._devices: dict[str, tuple[int, ...]] = {}
        """Ids of GPUs by key of a group; they stay the same."""

    def nodes(self) -> dict[str, ClusterNode]:
        """All nodes that Ray knows."""
        with ray_errors("tell its nodes"):
            return counted(_nodes(), _groups(), self._mine)

    def reserve(self, name: str, need: Need, avoid: Collection[str]) -> Slot:
        """Reserve what a process needs, or return what is reserved under the name."""
        with self._reserving, ray_errors(f"reserve {name}"):
            return self._slots(clear=True).get(name) or self._made(_PREFIX + name, need, avoid)

    def release(self, name: str) -> None:
        """Remove the group of that name, and wait until it is gone."""
        with ray_errors(f"release {name}"):
            self._remove(_PREFIX + name)

    def reservations(self) -> dict[str, Slot]:
        """What is reserved, by name. Groups of the graph that have no node are removed: those that a crash left
        unfinished, and those whose node has died."""
        # One that is just being made has no node either.
        is_quiet = self._reserving.acquire(blocking=False)
        try:
            with ray_errors("tell what is reserved"):
                return self._slots(clear=is_quiet)
        finally:
            if is_quiet:
                self._reserving.release()

    def _slots(self, clear: bool) -> dict[str, Slot]:
        alive = {row["NodeID"] for row in ray.nodes() if row["Alive"]}
        mine = [group for group in _groups() if group.name.startswith(self._mine)]
        for group in mine:
            if clear and not group.is_made:
                self._remove(group.name)
        return {
            group.name.removeprefix(_PREFIX): Slot(group.node, self._ids(group))
            for group in mine
            if group.is_made and group.node in alive
        }

    def _made(self, name: str, need: Need, avoid: Collection[str]) -> Slot:
        """Try the nodes that have room, one after the other."""
        until = time.monotonic() + _SETTLES_S
        while True:
            nodes, groups = _nodes(), _groups()
            try:
                chosen = choose(counted(nodes, groups, self._mine), groups, self._mine, need, avoid)
            except DeviceError:
                if time.monotonic() > until:
                    raise
                time.sleep(_LOOK_S)
                continue
            bundle = bundle_of(need, resource_of(nodes))
            for node in chosen:
                if (slot := self._created(name, node, bundle)) is not None:
                    return slot
            # Shares of several devices are free there, and not one device; or others took them.
            raise lacking(need, dict.fromkeys(chosen, 0))

    def _created(self, name: str, node: str, bundle: dict[str, float]) -> Slot | None:
        """Create a group on that node, with the keeper of its GPUs; None, and no group, if there is no room."""
        group = placement_group([bundle], name=name, lifetime="detached", bundle_label_selector=[{_NODE_LABEL: node}])
        with ExitStack() as undo:
            undo.callback(self._remove, name)
            if not group.wait(_READY_WITHIN_S):
                return None
            slot = Slot(node, self._ids(Group(name, node, bundle, key=group.id.hex())))
            undo.pop_all()
        return slot

    def _ids(self, group: Group) -> tuple[int, ...]:
        """Ids of the GPUs of a group, by its keeper; empty for a group without."""
        if GPU not in group.bundle:
            return ()
        if group.key not in self._devices:
            where, name = PlacementGroupSchedulingStrategy(_handle(group), 0), f"{group.name}/{group.key}"
            options = {"name": name, "get_if_exists": True, "lifetime": "detached", "scheduling_strategy": where}
            keeper = ray.remote(DeviceKeeper).options(num_cpus=0, num_gpus=group.bundle[GPU], **options).remote()
            ids = ray.get(keeper.devices.remote(), timeout=_DONE_WITHIN_S)
            if not all(number.isdigit() for number in ids):
                remedy = "start its raylet with indices in CUDA_VISIBLE_DEVICES, or without"
                raise SupervisorError(f"node {group.node} names its GPUs {', '.join(ids)}", remedy)
            self._devices[group.key] = tuple(sorted(map(int, ids)))
        return self._devices[group.key]

    def _remove(self, name: str) -> None:
        # Ray ends the keeper with its group.
        until = time.monotonic() + _DONE_WITHIN_S
        while found := [group for group in _groups() if group.name == name]:
            for group in found:
                self._devices.pop(group.key, None)
                remove_placement_group(_handle(group))
            if time.monotonic() > until:
                raise SupervisorError(f"Ray does not remove the placement group {name}", "see `ray status`")
            time.sleep(_LOOK_S)


def _groups() -> list[Group]:
    """All that are not removed."""
    rows = {key: row for key, row in placement_group_table().items() if row["state"] != "REMOVED"}
    return [
        Group(
            row["name"], row["bundles_to_node_id"].get(0, ""), row["bundles"].get(0, {}), row["state"] == "CREATED", key
        )
        for key, row in rows.items()
    ]


def _handle(group: Group) -> PlacementGroup:
    return PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group.key)))


def _nodes() -> list[RayNode]:
    available = available_resources_per_node()
    return [
        RayNode(row["NodeID"], row["Alive"], row["Resources"], available.get(row["NodeID"], {}), row["Labels"] or {})
        for row in ray.nodes()
    ]
