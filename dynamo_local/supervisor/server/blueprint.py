"""The blueprint of a running server: how its processes are made. `dynamo serve` writes it, the actuator reads it.

The file holds the services' environments, secrets included, and lies in the run directory, mode 0600. It exists from
the registration of all watchers until the server begins to stop. What runs may be changed while it exists.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from dynamo_local.core.errors import DecodeError, SupervisorError, UsageError
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.names import HTTP_PORT_ENV, select_watcher
from dynamo_local.supervisor.server.templates import ServiceTemplate
from state.devices import Inventory
from state.files import replace_file, system_errors
from state.model import Component, State
from state.paths import Sockets, StatePaths
from state.record import read_record

_WAIT = "`dynamo wait` waits until it is ready"


class Blueprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The templates of a server's services, and the values that all its processes share.

    `death_pipe`: address of the pipe on whose end every watcher's process ends. `ready_deadline_s`: for a worker that
    is added. `drain_deadline_s`: for a worker that is told to end.
    """

    death_pipe: str
    working_dir: str
    inventory: Inventory
    templates: tuple[ServiceTemplate, ...]
    ready_deadline_s: float
    drain_deadline_s: float

    @property
    def workers(self) -> tuple[ServiceTemplate, ...]:
        """The templates of services that are workers."""
        return tuple(template for template in self.templates if template.role in ENGINE_ROLES)

    def worker(self, service: str) -> ServiceTemplate:
        """The template of a service of workers. Raises UsageError for any other name."""
        for template in self.workers:
            if template.service == service:
                return template
        known = ", ".join(template.service for template in self.workers) or "none"
        raise UsageError(f"{service!r} is not a service of workers", f"those of this graph are: {known}")

    def template(self, service: str) -> ServiceTemplate:
        """The template of a service. Raises UsageError for what is no service."""
        found = {template.service: template for template in self.templates}
        template = found.get(service)
        if template is None:
            raise UsageError(f"there is no service {service!r}", f"those of this graph are: {', '.join(found)}")
        return template

    def restartable(self, service: str) -> ServiceTemplate:
        """The template of a service whose processes may be restarted. Raises UsageError for the service that holds the
        clients' connections, and for what is no service."""
        template = self.template(service)
        if HTTP_PORT_ENV in template.environment:
            raise UsageError(
                f"{service} holds the clients' connections, which a restart would cut",
                "end the server with `dynamo stop`, which lets streams finish, and serve again",
            )
        return template

    def worker_in(self, role: str) -> ServiceTemplate:
        """The first template whose workers start in that role. Raises UsageError if there is none."""
        for template in self.workers:
            if template.role == role:
                return template
        known = ", ".join(sorted({template.role for template in self.workers})) or "none"
        raise UsageError(f"no service has workers in the role {role!r}", f"roles of this graph are: {known}")

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
        except msgspec.MsgspecError as error:
            raise DecodeError(f"not a blueprint: {path}: {error}") from error


def why_absent(paths: StatePaths) -> SupervisorError:
    """The error for a file that is missing from the run directory of a server that runs."""
    namespace = paths.namespace
    record = read_record(paths)
    if record is None and not paths.statefile.exists():
        return SupervisorError(f"the server in namespace {namespace} is only starting", _WAIT)
    if not paths.run_dir.exists():
        return _removed(paths.run_dir)
    if record is None or record.phase == "running" or paths.blueprint_file.exists():
        return _removed(f"a file in {paths.run_dir}")
    if record.phase == "stopping":
        return SupervisorError(
            f"the server in namespace {namespace} is stopping", "`dynamo ls` shows whether it has ended"
        )
    return SupervisorError(f"the server in namespace {namespace} is only starting", _WAIT)


def _removed(what: object) -> SupervisorError:
    return SupervisorError(f"{what} was removed: the server goes on, and makes it again", "try again in a moment")


def check_reachable(paths: StatePaths, state: State) -> None:
    """Raise SupervisorError, with the reason, if circusd's socket is missing."""
    if not Sockets.of_endpoint(state.circus_endpoint).circus.exists():
        raise why_absent(paths)


def worker_of(state: State, watcher: str) -> Component:
    """The entry of a worker that is not a mere template; `watcher` as `select_watcher` takes it. Raises UsageError."""
    workers = {c.watcher_name: c for c in state.components.values() if c.holds and is_worker(c)}
    return workers[select_watcher(watcher, workers)]


def is_worker(component: Component) -> bool:
    """Whether the entry is a worker's, whatever its role is now."""
    return component.role in ENGINE_ROLES
