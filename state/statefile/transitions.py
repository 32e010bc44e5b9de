"""The transitions of a state. Each is pure and returns a new state; an illegal one raises StateError.

    (no entry)  --reserve-->      reserved    the devices are reserved: nobody else gets them
    template    --reserve-->      reserved    (so, too, for a service whose process is gone)
    reserved    --claim-->        holding     the process may be started, on the devices that are reserved
    (no entry)  --claim-->        holding     the process may be started: its devices are its own
    template    --claim-->        holding     (claimed as "starting", it is undone unless it becomes ready)
    starting    --settle-->       holding     the process that was added has become ready; the one that it replaces, if
                                              any, retires in the same transition
    holding     --retire-->       retiring    the process is to end, and is not to be started again
    holding     --restart-->      restarting  the process is to end, and to be started once more
    restarting  --settle-->       holding     the process that was started once more has become ready
    holding     --heard-->        holding     the process has announced itself: its lease, pid and role
    holding     --set_role-->     holding     the process has taken up another role, which its successor keeps
    holding     --clear_lease-->  holding     that process is gone, another one is to follow
    holding     --release-->      template    unsuffixed: gone for good, the entry stays, emptied
    holding     --release-->      (no entry)  suffixed: gone for good
    holding     --unclaim-->      reserved    the process is gone, and what it held stays reserved
    any         --remove-->       (no entry)  a start that is rolled back
    template    --remove_revision-->  (no entry)  all of an endpoint's revision at once

"holding" is any entry with resources, whatever its phase. A claim precedes the start of its process, and a release
follows its end, so that no device is ever in use without being recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import msgspec

from dynamo_local.core.errors import ConfigError, StateError
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.names import FIRST_OF_MAIN, LOCAL_NODE, Watcher, parse_watcher
from dynamo_local.core.shares import summed
from state.devices.allocation import DeviceKind
from state.statefile.model import Component, Owner, Phase, Resources, State, revision_of

NO_RESOURCES = Resources()


def new_state(
    namespace: str,
    circus_endpoint: str,
    device_kind: DeviceKind,
    owner: Owner,
    environment: Mapping[str, str] | None = None,
    node: str = LOCAL_NODE,
) -> State:
    """The state of a server, on that node, that has started nothing yet."""
    return State(
        namespace=namespace,
        node=node,
        circus_endpoint=circus_endpoint,
        device_kind=device_kind,
        owner=owner,
        environment=dict(environment or {}),
    )


def reserve(
    state: State,
    watcher: Watcher | str,
    *,
    role: str,
    devices: Iterable[int] = (),
    share: float = 1.0,
    node: str | None = None,
    revision: str = "",
) -> State:
    """Reserve devices, or a share of one, for a process of the watcher that is about to be claimed. Illegal as `claim`,
    and if they are reserved already."""
    held = _unheld(state, watcher)
    cmd = "" if held is None else held.cmd
    return claim(
        state,
        watcher,
        role=role,
        cmd=cmd,
        devices=devices,
        share=share,
        phase="reserved",
        node=node,
        revision=revision,
    )


def claim(
    state: State,
    watcher: Watcher | str,
    *,
    role: str,
    cmd: str,
    devices: Iterable[int] = (),
    share: float = 1.0,
    phase: Phase | None = None,
    replaces: str | None = None,
    node: str | None = None,
    revision: str = "",
) -> State:
    """Give the watcher an entry and devices of a node, or a share of one: those that are reserved for it, if any are.
    Without a `node`, those of the state's own. `revision`: that the process serves, if name and role do not tell it.

    Illegal if it is claimed already, if less of a device is free, or if the watcher is suffixed and its service has no
    unsuffixed entry.
    """
    name = str(watcher)
    node = state.node if node is None else node
    parts = _parse(name)
    ids = tuple(sorted(devices))
    held = state.components.get(name)
    if held is None or held.phase != "reserved":
        _unheld(state, watcher)
    elif (held.node, held.devices, held.resources.share) != (node, ids, share):
        raise StateError(f"{name} has reserved {list(held.devices)} and claims {list(ids)}")
    if parts.index > 0 and str(replace(parts, index=0)) not in state.components:
        raise StateError(f"{name} is claimed before the first entry of {parts.service}", "claim that one first")
    # The default is written as nothing if it is the very same object.
    resources = Resources(ids) if share == 1 else Resources(ids, share)
    component = Component(
        *(name, parts.service, role, cmd, resources),
        phase=phase,
        replaces=replaces,
        node=node,
        revision=revision or revision_of(parts, role),
    )
    return _with(state, component)


def settle(state: State, watcher: Watcher | str) -> State:
    """Record that a started process is ready and is to stay, and that the one that it replaces is to end.

    Illegal for a retiring entry, and for a reserved one. Settling again changes nothing.
    """
    component = claimed(state, watcher)
    if component.phase == "retiring":
        raise StateError(f"{watcher} is to end", "wait until it has, then add another one")
    replaced = state.components.get(component.replaces) if component.replaces is not None else None
    state = _with(state, msgspec.structs.replace(component, phase=None, replaces=None))
    return state if replaced is None or not replaced.holds else retire(state, replaced.watcher)


def retire(state: State, watcher: Watcher | str) -> State:
    """Record that the watcher's process is to end for good. The entry keeps its devices until it is released."""
    return _with(state, msgspec.structs.replace(_holding(state, watcher), phase="retiring", replaces=None))


def restart(state: State, watcher: Watcher | str) -> State:
    """Record that the watcher's process is to end, and another one to be started under its name. Illegal while another
    change of the entry is under way."""
    component = _holding(state, watcher)
    if component.phase is not None:
        raise StateError(f"{watcher} is {component.phase}", "wait until that is over")
    return _with(state, msgspec.structs.replace(component, phase="restarting"))


def unclaim(state: State, watcher: Watcher | str) -> State:
    """Record that the watcher's process is gone, and that what it held stays reserved."""
    component = msgspec.structs.replace(_holding(state, watcher), lease=None, pid=None, phase="reserved", replaces=None)
    return _with(state, component)


def add_template(state: State, watcher: Watcher, role: str, revision: str = "") -> State:
    """Have an unsuffixed entry of the watcher's service, emptied if there was none."""
    first = watcher.first
    if str(first) in state.components:
        return state
    return release(claim(state, first, role=role, cmd="", revision=revision), first)


def heard(state: State, presences: Iterable[Presence], is_here: Callable[[Presence], bool]) -> State:
    """Record lease, pid and role of each process as its presence tells them, in place of those of an earlier one.

    Entries without a presence stay as they are: nothing is known of their processes. So do those that are not claimed:
    what is heard of is a process that has ended. `is_here`: whether a presence is that of a process which lives on the
    state's own node; on this node another one has ended, or is a stranger.
    """
    found = dict(state.components)
    for presence in presences:
        component = found.get(presence.watcher)
        if component is None or not component.holds or component.phase == "reserved":
            continue
        told = msgspec.structs.replace(component, lease=presence.lease, pid=presence.pid, role=presence.role)
        if told != component and (component.node != state.node or is_here(presence)):
            found[presence.watcher] = told
    return state if found == state.components else _replaced(state, found)


def set_role(state: State, watcher: Watcher | str, lease: str, role: str) -> State:
    """Record the role of the watcher's process. Illegal if the lease is not that of its present process."""
    component = _holding(state, watcher)
    if component.lease != lease:
        raise StateError(f"{watcher} is another process by now", "look at `dynamo ps`, and try again")
    return _with(state, msgspec.structs.replace(component, role=role))


def clear_lease(state: State, watcher: Watcher | str, lease: str) -> State:
    """Record that the process of that lease is gone. The watcher keeps its devices for the next one.

    Changes nothing if the lease is not that of the present process: the call may come late.
    """
    component = state.components.get(str(watcher))
    if component is None or component.lease != lease:
        return state
    return _with(state, msgspec.structs.replace(component, lease=None, pid=None))


def release(state: State, watcher: Watcher | str) -> State:
    """Record that the watcher's process is gone for good. An unsuffixed entry stays, emptied, as the template of its
    service."""
    component = _holding(state, watcher)
    if component.watcher.index > 0:
        return remove(state, watcher)
    return _with(
        state,
        msgspec.structs.replace(component, resources=NO_RESOURCES, lease=None, pid=None, phase=None, replaces=None),
    )


def remove(state: State, watcher: Watcher | str) -> State:
    """Remove the entry, template or not. Illegal for an unsuffixed entry while its service has suffixed ones."""
    component = entry(state, watcher)
    of_service = [other for other in state.components.values() if other.watcher.first == component.watcher]
    if len(of_service) > 1:
        raise StateError(f"{component.watcher_name} is the template of others", "release it instead")
    return _replaced(state, {name: c for name, c in state.components.items() if name != str(watcher)})


def remove_revision(state: State, revision: str) -> State:
    """Remove the entries of a revision, which is to have no process any more. Illegal while one of them holds, and for
    what serves no revision. Harmless if there is none."""
    if not revision:
        raise StateError("entries of processes that serve no revision are not removed together")
    mine = {name: component for name, component in state.components.items() if component.revision == revision}
    holding = sorted(name for name, component in mine.items() if component.holds)
    if holding:
        raise StateError(f"{revision} still has processes: {', '.join(holding)}", "end them first")
    return _replaced(state, {name: c for name, c in state.components.items() if name not in mine})


def taken(state: State) -> frozenset[int]:
    """The ids of the devices of the state's own node that entries hold."""
    return frozenset(device for component in state.here.values() for device in component.devices)


def shares_taken(state: State) -> dict[int, float]:
    """How much of each device of the state's own node entries hold, by id; devices that nobody holds are left out."""
    found: dict[int, list[float]] = {}
    for component in state.here.values():
        for device in component.devices:
            found.setdefault(device, []).append(component.resources.share)
    return {device: summed(shares) for device, shares in found.items()}


def holding(state: State) -> frozenset[str]:
    """The watchers that hold something."""
    return frozenset(name for name, component in state.components.items() if component.holds)


def in_phase(state: State, phase: Phase) -> tuple[str, ...]:
    """The watchers in that phase, in the statefile's order."""
    return tuple(name for name, component in state.components.items() if component.phase == phase)


def claimed(state: State, watcher: Watcher | str) -> Component:
    """The entry of a watcher whose process may run. Raises StateError if there is none that is claimed."""
    component = _holding(state, watcher)
    if component.phase == "reserved":
        raise StateError(f"{watcher} is only reserved", "claim it first")
    return component


def entry(state: State, watcher: Watcher | str) -> Component:
    """The watcher's entry. Raises StateError if there is none, as of a claim that was lost with a damaged statefile."""
    component = state.components.get(str(watcher))
    if component is None:
        known = ", ".join(sorted(state.components)) or "none"
        raise StateError(f"there is no entry {watcher}", f"entries are: {known}")
    return component


def entries(state: State, service: str, revision: str = FIRST_OF_MAIN) -> tuple[Component, ...]:
    """The entries of a service by index, the unsuffixed one first: those that serve that revision, or none."""
    mine = (c for c in state.components.values() if c.component == service and c.revision == revision)
    return tuple(sorted(mine, key=lambda component: component.watcher))


def next_watcher(state: State, service: str, revision: str = FIRST_OF_MAIN) -> Watcher:
    """The watcher for one more process of the service: the unsuffixed one if it is not holding, else that of the lowest
    free suffix. Revisions without names of their own draw from one sequence of numbers."""
    first = Watcher.of(state.namespace, service, 0, revision)
    used = {c.watcher.index for c in state.components.values() if c.holds and c.watcher.first == first}
    return replace(first, index=next(i for i in range(len(used) + 1) if i not in used))


def _with(state: State, component: Component) -> State:
    return _replaced(state, {**state.components, component.watcher_name: component})


def _replaced(state: State, components: dict[str, Component]) -> State:
    return msgspec.structs.replace(state, components=components)


def _unheld(state: State, watcher: Watcher | str) -> Component | None:
    """The entry of a watcher that holds nothing, if there is one. StateError if it holds."""
    held = state.components.get(str(watcher))
    if held is not None and held.holds:
        raise StateError(f"{watcher} is already claimed", "release it first")
    return held


def _holding(state: State, watcher: Watcher | str) -> Component:
    component = entry(state, watcher)
    if not component.holds:
        raise StateError(f"{watcher} holds nothing: its process is gone", "claim it first")
    return component


def _parse(name: str) -> Watcher:
    try:
        return parse_watcher(name)
    except ConfigError as error:
        raise StateError(error.cause, error.remedy) from error
