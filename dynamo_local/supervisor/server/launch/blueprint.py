"""The blueprint of a running server: how its processes are made. `dynamo serve` writes it, the actuator reads it.

The file holds the services' environments, secrets included, and lies in the run directory, mode 0600. It exists from
the registration of all watchers until the server begins to stop. What runs may be changed while it exists. The server
writes it anew as revisions of endpoints come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Lock

import msgspec

from dynamo_local.control.errors import why_absent
from dynamo_local.core.errors import DecodeError, StateError, SupervisorError, UsageError
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.names import HTTP_PORT_ENV, MAIN, Watcher, endpoint_of, select_watcher
from dynamo_local.supervisor.server.launch.templates import ServiceTemplate
from state.devices.allocation import Inventory
from state.files import replace_file, system_errors
from state.paths import StatePaths
from state.statefile.model import Component, State


class Blueprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The templates of a server's services, and the values that all its processes share.

    `death_pipe`: address of the pipe on whose end every watcher's process ends. `ready_deadline_s`: for a worker that
    is added. `drain_deadline_s`: for a worker that is told to end. `cluster_devices`: where workers live on the nodes
    of a cluster, the number of devices there that they hold or may take, as of a second ago; `inventory` is then that
    of the server's own machine, without devices.
    """

    death_pipe: str
    working_dir: str
    inventory: Inventory
    templates: tuple[ServiceTemplate, ...]
    ready_deadline_s: float
    drain_deadline_s: float
    cluster_devices: float | None = None

    @property
    def clustered(self) -> bool:
        """Whether workers live on the nodes of a cluster."""
        return self.cluster_devices is not None

    @property
    def device_count(self) -> float:
        """Number of devices that the server's workers hold or may take, as far as nobody else holds them."""
        return len(self.inventory.devices) if self.cluster_devices is None else self.cluster_devices

    @property
    def workers(self) -> tuple[ServiceTemplate, ...]:
        """The templates of services that are workers."""
        return tuple(template for template in self.templates if template.role in ENGINE_ROLES)

    @property
    def revisions(self) -> frozenset[str]:
        """The revisions that have templates."""
        return frozenset(template.revision for template in self.templates if template.revision)

    def endpoint_of(self, watcher: Watcher) -> str:
        """The endpoint whose worker has that name; empty for a process that is no worker."""
        if watcher.revision:
            return endpoint_of(watcher.revision)
        of_main = any(one.service == watcher.service and endpoint_of(one.revision) == MAIN for one in self.templates)
        return MAIN if of_main else ""

    def with_revision(self, templates: Iterable[ServiceTemplate]) -> Blueprint:
        """The blueprint with the templates of an endpoint's revision, in place of those that it has of it."""
        added = tuple(templates)
        revisions = {template.revision for template in added}
        others = (template for template in self.templates if template.revision not in revisions)
        return msgspec.structs.replace(self, templates=(*others, *added))

    def without_revision(self, revision: str) -> Blueprint:
        """The blueprint without the templates of that endpoint's revision."""
        left = tuple(template for template in self.templates if template.revision != revision)
        return msgspec.structs.replace(self, templates=left)

    def workers_of(self, revision: str) -> tuple[ServiceTemplate, ...]:
        """The templates of a revision."""
        return tuple(template for template in self.templates if revision and template.revision == revision)

    def worker(self, service: str, revision: str) -> ServiceTemplate:
        """The template of a revision's service of workers. Raises UsageError for any other name."""
        workers = self.workers_of(revision)
        for template in workers:
            if template.service == service:
                return template
        known = ", ".join(template.service for template in workers) or "none"
        raise UsageError(f"{service!r} is not a service of workers", f"those of {_whose(revision)} are: {known}")

    def template(self, service: str, revision: str) -> ServiceTemplate:
        """The template of a service: of a revision, or, if that is empty, of those that serve no model of their own.
        Raises UsageError for what is no service of it."""
        found = {template.service: template for template in self.templates if template.revision == revision}
        template = found.get(service)
        if template is None:
            known = ", ".join(found) or "none"
            raise UsageError(f"there is no service {service!r}", f"those of {_whose(revision)} are: {known}")
        return template

    def restartable(self, service: str, revision: str) -> ServiceTemplate:
        """The template of a service whose processes may be restarted. Raises UsageError for the service that holds the
        clients' connections, and for what is no service."""
        template = self.template(service, revision)
        if HTTP_PORT_ENV in template.environment:
            raise UsageError(
                f"{service} holds the clients' connections, which a restart would cut",
                "end the server with `dynamo stop`, which lets streams finish, and serve again",
            )
        return template

    def worker_in(self, role: str, revision: str) -> ServiceTemplate:
        """The first template of a revision whose workers start in that role. Raises UsageError if there is none."""
        workers = self.workers_of(revision)
        for template in workers:
            if template.role == role:
                return template
        known = ", ".join(sorted({template.role for template in workers})) or "none"
        raise UsageError(f"no service has workers in the role {role!r}", f"roles of {_whose(revision)} are: {known}")

    def write(self, path: Path) -> None:
        replace_file(path, msgspec.json.encode(self))

    @classmethod
    def read(cls, paths: StatePaths) -> Blueprint:
        """Raises SupervisorError when there is none, StateError or DecodeError when it cannot be read."""
        path = paths.blueprint_file
        if not path.exists():
            raise why_absent(paths)
        with system_errors(f"cannot read {path}"):
            data = path.read_bytes()
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise DecodeError(f"not a blueprint: {path}: {error}") from error


class BlueprintFile:
    """The blueprint file of a running server, which alone changes it, as endpoints' revisions come and go.

    Safe from any thread; each call blocks for milliseconds.
    """

    def __init__(self, paths: StatePaths) -> None:
        self._paths = paths
        self._lock = Lock()
        self._last: Blueprint | None = None
        self._ended = False

    def write(self, blueprint: Blueprint) -> None:
        """Write the file. Does nothing once `end` was called."""
        with self._lock:
            self._write(blueprint)

    def current(self) -> Blueprint:
        """The blueprint: as it was read last if the file cannot be read now. Raises as `Blueprint.read` if it never
        was."""
        with self._lock:
            return self._read()

    def of_revisions(self) -> tuple[ServiceTemplate, ...]:
        """The templates of revisions; none before the file is written for the first time."""
        try:
            return tuple(template for template in self.current().templates if template.revision)
        except (SupervisorError, StateError, DecodeError):
            return ()

    def revisions(self) -> frozenset[str]:
        """The revisions that have templates; none before the file is written for the first time."""
        return frozenset(template.revision for template in self.of_revisions())

    def change(self, change: Callable[[Blueprint], Blueprint]) -> Blueprint:
        """Replace the blueprint by `change(blueprint)` and return it; one that stays as it is takes no disk space.

        Raises StateError, and SupervisorError once `end` was called.
        """
        with self._lock:
            if self._ended:
                raise why_absent(self._paths)
            before = self._read()
            after = change(before)
            if after != before:
                self._write(after)
            return after

    def end(self) -> None:
        """Remove the file: nobody may add or remove workers any more."""
        with self._lock:
            self._ended = True
            self._paths.blueprint_file.unlink(missing_ok=True)

    def _read(self) -> Blueprint:
        try:
            self._last = Blueprint.read(self._paths)
        except (SupervisorError, StateError, DecodeError):
            # A file that was removed or damaged is written anew by the server (upkeep/files.py).
            if self._last is None:
                raise
        return self._last

    def _write(self, blueprint: Blueprint) -> None:
        if not self._ended:
            blueprint.write(self._paths.blueprint_file)
            self._last = blueprint


def _whose(revision: str) -> str:
    return "this graph" if endpoint_of(revision) in {"", MAIN} else revision


def worker_of(state: State, watcher: str) -> Component:
    """The entry of a worker that is not a mere template; `watcher` as `select_watcher` takes it. Raises UsageError."""
    workers = {c.watcher_name: c for c in state.components.values() if c.holds and is_worker(c)}
    return workers[select_watcher(watcher, workers)]


def is_worker(component: Component) -> bool:
    """Whether the entry is a worker's, whatever its role is now."""
    return component.role in ENGINE_ROLES
