"""The statefile's contents: frozen, validated on every construction, versioned.

The JSON has Dynamo's shape (`namespace`, `circus_endpoint`, `components.{watcher}.{watcher_name, cmd,
resources.allocated_gpus, lease}`, `environment`) with additions of our own. A state that breaks one of the rules below
can be neither built nor read: both raise StateError. Ranges of numbers are checked when a state is written or read.

- A component's key is its watcher's name; its namespace is the state's, its service is `component`.
- A device is one of a node: its key is (node, id). It is held whole by one component, or in shares that add up to at
  most 1.
- A process is one of a node: a pid tells nothing without the node of its entry. `owner` and `circus_endpoint` are of
  the state's own node, which alone writes the file.
- An entry whose process is gone holds nothing: no device list, no lease, no pid, no phase. Only an unsuffixed entry
  may be such a template; a suffixed one exists only while it holds.
- Only an entry in the phase "starting" replaces another one.
- There are no secrets: `environment` takes DYN_* settings whose names do not look secret; commands carry no
  credentials.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec

from dynamo_local.core.errors import ConfigError, StateError
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.names import (
    FIRST_OF_MAIN,
    LOCAL_NODE,
    LOG_ENV,
    NAMESPACE_ENV,
    Watcher,
    check_namespace,
    check_node,
    parse_watcher,
)
from dynamo_local.core.shares import LEAST_SHARE, fits, held, summed
from state.devices.allocation import DeviceKind
from state.devices.inventory import CPU_SLOTS_VARIABLE
from state.paths import STATE_DIR_VARIABLE

SCHEMA_VERSION = 6
"""Version 2 has phases: a program that ignored them would start a retiring worker again. Version 3 has restarts.
Version 4 has watchers of endpoints' revisions: a program that ignored the revision in a watcher's name would take an
endpoint's worker for one of the graph's own service of that name. It also has shares of devices. Version 5 has
reservations: a program that ignored them would take one for a worker that is to run. It also has nodes: a program that
ignored them would kill by pids, and free devices, of another machine. Version 6 has the revision that a worker serves,
also where its watcher's name has none."""

RECORDED_SETTINGS = (NAMESPACE_ENV, STATE_DIR_VARIABLE, CPU_SLOTS_VARIABLE, LOG_ENV)
"""Environment variables that are recorded: they tell how a server was started, and none is secret."""

_SECRET_NAME = re.compile(r"TOKEN|KEY|PASSW|SECRET|CREDENTIAL", re.IGNORECASE)
_SECRET_OPTION = re.compile(
    r"(?:^|\s)--?(?:[\w.]+-)*(?:[\w.]*key|token|password|passwd|secret)(?=[\s=]|$)", re.IGNORECASE
)

Phase = Literal["reserved", "starting", "retiring", "restarting"]
"""The change of an entry that is under way. `reserved`: its devices are reserved, and its process is about to be
claimed. `starting`: its process was added, and is ended again unless it becomes ready. `retiring`: its process is to
end for good. `restarting`: its process is to end, and another one to start under its name and on its devices."""

Share = Annotated[float, msgspec.Meta(ge=LEAST_SHARE, le=1)]
DeviceId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Pid = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class Resources(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The devices of an entry. `allocated_gpus`: ids of GPUs or CPU slots; empty for a process that needs none. None
    for a template, whose process is gone: it is written as `{}`. `share`: the part of its one device that the entry
    holds; 1 (and not written) for devices that are held whole."""

    allocated_gpus: tuple[DeviceId, ...] | None = None
    share: Share = 1.0

    def __post_init__(self) -> None:
        if self.share != 1 and len(self.allocated_gpus or ()) != 1:
            raise StateError(f"a share of {self.share:g} is of one device, not of {list(self.allocated_gpus or ())}")


class Component(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A watcher's entry.

    `component`: the service's name. `lease`: the id of one process; a restarted process has a new one. `lease` and
    `pid` are None until the process was heard, and after its end. `phase`: the change under way, if there is one.
    `replaces`: the watcher that is to end once this one is ready. `node`: where the process runs, and whose its devices
    and pid are. `revision`: text of the endpoint's revision that the process serves; empty for one that serves no model
    of its own, such as a frontend.
    """

    watcher_name: str
    component: str
    role: str
    cmd: str
    resources: Resources = Resources()
    lease: str | None = None
    pid: Pid | None = None
    phase: Phase | None = None
    replaces: str | None = None
    node: str = LOCAL_NODE
    revision: str = ""

    def __post_init__(self) -> None:
        if self.replaces is not None and self.phase != "starting":
            raise StateError(f"entry {self.watcher_name} is to replace {self.replaces} and does not start")
        if not self.holds and (self.lease, self.pid, self.phase) != (None, None, None):
            raise StateError(f"entry {self.watcher_name} holds no resources but a lease, a pid or a phase")
        if self.phase == "reserved" and (self.lease, self.pid) != (None, None):
            raise StateError(f"entry {self.watcher_name} is only reserved and has a process")
        if not self.holds and self.watcher.index > 0:
            raise StateError(f"entry {self.watcher_name} is suffixed and holds nothing")
        if self.watcher.revision not in ("", self.revision):
            raise StateError(f"entry {self.watcher_name} serves {self.revision or 'nothing'}")
        if len(set(self.devices)) != len(self.devices):
            raise StateError(f"entry {self.watcher_name} holds a device twice: {list(self.devices)}")
        option = _SECRET_OPTION.search(self.cmd)
        if option:
            raise StateError(
                f"the command of {self.watcher_name} carries {option[0].strip()}, which looks secret",
                "pass secrets through a file of mode 0600",
            )

    @property
    def holds(self) -> bool:
        """Whether the entry claims resources for a process, which may be about to start. False for a template."""
        return self.resources.allocated_gpus is not None

    @property
    def devices(self) -> tuple[int, ...]:
        return self.resources.allocated_gpus or ()

    @property
    def device_count(self) -> float:
        """What its devices count for: their number, or the share of one."""
        return held(len(self.devices), self.resources.share)

    @property
    def watcher(self) -> Watcher:
        try:
            return parse_watcher(self.watcher_name)
        except ConfigError as error:
            raise StateError(error.cause, error.remedy) from error


class Owner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process, which its start time tells from a later one of the same pid. `start_time`: ticks since boot."""

    pid: Pid
    start_time: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The processes of one namespace. Change it by `state.statefile.transitions`; treat its dicts as read-only."""

    schema_version: int = SCHEMA_VERSION
    namespace: str
    node: str = LOCAL_NODE
    circus_endpoint: str
    device_kind: DeviceKind
    owner: Owner
    components: dict[str, Component] = {}
    environment: dict[str, str] = {}

    def __post_init__(self) -> None:
        _check_version(self.schema_version)
        try:
            check_namespace(self.namespace)
            for node in {self.node, *(component.node for component in self.components.values())}:
                check_node(node)
        except ConfigError as error:
            raise StateError(error.cause, error.remedy) from error
        for key, component in self.components.items():
            self._check_component(key, component)
        self._check_devices()
        for name in self.environment:
            _check_setting(name)

    def _check_component(self, key: str, component: Component) -> None:
        if component.watcher_name != key:
            raise StateError(f"entry {key} carries the watcher name {component.watcher_name}")
        watcher = component.watcher
        if (watcher.namespace, watcher.service) != (self.namespace, component.component):
            raise StateError(f"entry {key} is not one of {component.component} in namespace {self.namespace}")

    def _check_devices(self) -> None:
        holders: dict[tuple[str, int], list[Component]] = {}
        for name, component in self.components.items():
            for device in component.devices:
                others = holders.setdefault((component.node, device), [])
                if not fits(summed(other.resources.share for other in others), component.resources.share):
                    raise StateError(f"device {device} is held by both {_named(others)} and {name}")
                others.append(component)

    @property
    def here(self) -> dict[str, Component]:
        """The entries of processes on the state's own node, by watcher. Only their pids and devices may be acted on
        here: those of others are numbers of other machines."""
        return {name: component for name, component in self.components.items() if component.node == self.node}


class _Version(msgspec.Struct):
    """The field that every version of the file has."""

    schema_version: int


def encode(state: State) -> bytes:
    """Encode the state as indented JSON. Raises StateError for a state that `decode` would not give back."""
    try:
        data = msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n"
    except (TypeError, OverflowError, UnicodeError) as error:
        raise StateError(f"the state cannot be written: {error}") from error
    if decode(data) != state:
        raise StateError("the state cannot be written: it would not be read back the same")
    return data


def decode(data: bytes) -> State:
    """Inverse of `encode`, also for the version before. Raises StateError for anything else, including another
    version."""
    try:
        version = msgspec.json.decode(data, type=_Version).schema_version
        if version == SCHEMA_VERSION - 1:
            return msgspec.convert(_converted(msgspec.json.decode(data)), State)
        _check_version(version)
        return msgspec.json.decode(data, type=State)
    except (msgspec.MsgspecError, ConfigError, UnicodeError, RecursionError) as error:
        raise StateError(f"not a statefile: {error}") from error


def _converted(document: dict[str, Any]) -> dict[str, Any]:
    """A document of version 5 as one of version 6: entries say which revision their processes serve."""
    entries = msgspec.convert(document.get("components", {}), dict[str, _EntryBefore])
    converted = {
        name: {**document["components"][name], "revision": revision_of(parse_watcher(name), entry.role)}
        for name, entry in entries.items()
    }
    return {**document, "schema_version": SCHEMA_VERSION, "components": converted}


class _EntryBefore(msgspec.Struct):
    role: str


def revision_of(watcher: Watcher, role: str) -> str:
    """The revision that a process serves of which nothing but name and role is known."""
    return watcher.revision or (FIRST_OF_MAIN if role in ENGINE_ROLES else "")


def recorded_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that the statefile records."""
    return {name: environ[name] for name in RECORDED_SETTINGS if name in environ}


def _named(components: Iterable[Component]) -> str:
    return ", ".join(component.watcher_name for component in components)


def _check_version(version: int) -> None:
    if version != SCHEMA_VERSION:
        raise StateError(
            f"the statefile has schema version {version}, this program reads {SCHEMA_VERSION}",
            "use the dynamo-local version that wrote it",
        )


def _check_setting(name: str) -> None:
    if not name.startswith("DYN_"):
        raise StateError(f"environment setting {name} is not recorded", "only DYN_* settings are")
    if _SECRET_NAME.search(name):
        raise StateError(f"environment setting {name} looks secret and is not recorded")
