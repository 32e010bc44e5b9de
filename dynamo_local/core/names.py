"""Every name that two processes must agree on, spelled once: watchers, subjects, files.

Builders stand beside their parsers. A subject is `dyn.{namespace}.{what}...`; namespaces and service names
contain no dot, so that a subject always splits unambiguously.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dynamo_local.core.errors import ConfigError

DEFAULT_NAMESPACE = "dynamo"
_NAMESPACE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,38}[A-Za-z0-9])?")
_SERVICE = re.compile(r"[A-Z][A-Za-z0-9]{0,63}")
_WATCHER = re.compile(r"(?P<namespace>[A-Za-z0-9-]+)_(?P<service>[A-Z][A-Za-z0-9]*)(?:_(?P<index>[1-9][0-9]{0,8}))?")

WATCHER_ENV = "DYN_WATCHER"
"""Set by the server in each of its processes: name of the process's watcher."""

NAMESPACE_ENV = "DYN_NAMESPACE"
"""Namespace of the server that commands talk to or start; --namespace takes precedence. The server sets its own in each
of its processes."""

LOG_ENV = "DYN_LOG"
"""Log level of the services: debug, info (the default), warning or error."""

HTTP_HOST_ENV = "DYN_HTTP_HOST"
"""Set by the server in the root service's process: address that the API listens on."""

HTTP_PORT_ENV = "DYN_HTTP_PORT"
"""Set by the server in the root service's process: port that the API listens on."""

BUS_SERVICE = "Nats"
"""Service name of the NATS server's watcher. No service of a graph may take it."""


FORKSERVER_SERVICE = "ForkServer"
"""Service name of the fork server's watcher, which services are forked from (process/forkserver). As above."""

MACHINERY = frozenset({BUS_SERVICE, FORKSERVER_SERVICE})
"""Watchers that are no services of the graph: they do not announce themselves."""


def check_namespace(namespace: str) -> str:
    """Return the namespace, or raise ConfigError. Letters, digits and inner hyphens, at most 40."""
    if not _NAMESPACE.fullmatch(namespace):
        raise ConfigError(
            f"namespace {namespace!r} is not valid",
            "use letters, digits and inner hyphens, at most 40 characters",
        )
    return namespace


def check_service(service: str) -> str:
    """Return the service name, or raise ConfigError. A capital, then letters and digits."""
    if not _SERVICE.fullmatch(service):
        raise ConfigError(f"service name {service!r} is not valid", "use a capital letter, then letters and digits")
    return service


@dataclass(frozen=True, order=True)
class Watcher:
    """A watcher's name in parts. Index 0 is the unsuffixed entry, the template for more."""

    namespace: str
    service: str
    index: int = 0

    def __str__(self) -> str:
        base = f"{self.namespace}_{self.service}"
        return base if self.index == 0 else f"{base}_{self.index}"


def parse_watcher(name: str) -> Watcher:
    """Inverse of `str(Watcher)`. Raises ConfigError for anything else."""
    match = _WATCHER.fullmatch(name)
    if match is None:
        raise ConfigError(f"{name!r} is not a watcher's name", "expected NAMESPACE_Service or NAMESPACE_Service_N")
    return Watcher(match["namespace"], match["service"], int(match["index"] or 0))


@dataclass(frozen=True)
class Subjects:
    """NATS subjects of one namespace."""

    namespace: str

    @property
    def _root(self) -> str:
        return f"dyn.{self.namespace}"

    def presence(self, watcher: str) -> str:
        """A process tells that it is there, what it is and how loaded it is."""
        return f"{self._root}.presence.{watcher}"

    @property
    def presences(self) -> str:
        return f"{self._root}.presence.*"

    @property
    def probe(self) -> str:
        """Asks every process to publish its presence at once."""
        return f"{self._root}.probe"

    @property
    def revoked(self) -> str:
        """Announces leases that are no longer valid."""
        return f"{self._root}.revoked"

    def work(self, lease: str) -> str:
        """Submissions and cancellations for one worker process."""
        return f"{self._root}.work.{lease}"

    def tokens(self, lease: str) -> str:
        """What workers send back to one frontend process."""
        return f"{self._root}.tokens.{lease}"

    @property
    def assign(self) -> str:
        """Asks the router for a worker (request-reply)."""
        return f"{self._root}.router.assign"

    @property
    def released(self) -> str:
        """Tells the router that a request left its worker."""
        return f"{self._root}.router.released"

    @property
    def charges(self) -> str:
        """Tells the router everything that a frontend has with workers."""
        return f"{self._root}.router.charges"

    def cached(self, lease: str) -> str:
        """Asks a worker what it has cached of a prompt (request-reply)."""
        return f"{self._root}.cached.{lease}"

    def pin(self, lease: str) -> str:
        """Asks a worker to keep blocks for another one to read (request-reply)."""
        return f"{self._root}.pin.{lease}"

    def role(self, lease: str) -> str:
        """Asks a worker to take up a role (request-reply)."""
        return f"{self._root}.role.{lease}"

    @property
    def holds(self) -> str:
        """Asks the server to hold the devices that are claimed (request-reply)."""
        return f"{self._root}.holds"

    @property
    def planner(self) -> str:
        """The planner tells what it sees and decides."""
        return f"{self._root}.planner"

    def moves(self, lease: str) -> str:
        """Asks a worker to take in a request that moves (request-reply)."""
        return f"{self._root}.moves.{lease}"

    def requests(self, lease: str) -> str:
        """Asks a frontend about its requests, or to move some (request-reply)."""
        return f"{self._root}.requests.{lease}"

    def claims(self, lease: str) -> str:
        """Claims a request of a frontend for prefill (request-reply)."""
        return f"{self._root}.claims.{lease}"

    @property
    def prefill_jobs(self) -> str:
        """The prefill queue's one subject, kept by its stream."""
        return f"{self._root}.prefill.jobs"

    @property
    def prefill_stream(self) -> str:
        """The JetStream stream that is the prefill queue. (Names of streams take no dots.)"""
        return f"dyn_{self.namespace}_prefill"

    @property
    def settings_bucket(self) -> str:
        """The JetStream key-value bucket of settings that change while the server runs."""
        return f"dyn_{self.namespace}_settings"

    @property
    def setting_changes(self) -> str:
        """On subjects that match, NATS tells of changes in that bucket. What stands for `>` is the setting's name."""
        return f"{self._root}.settings.>"

    def call(self, service: str, endpoint: str) -> str:
        """Starts a call of a service's endpoint; the instances of the service form a queue group."""
        return f"{self._root}.call.{service}.{endpoint}"

    def call_control(self, call_id: str) -> str:
        """Caller to the instance that serves the call: cancel."""
        return f"{self._root}.callctl.{call_id}"
