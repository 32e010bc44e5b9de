"""Names that two processes must agree on, each spelled once: watchers, subjects, environment variables.

Builders stand beside their parsers. A subject is `dyn.{namespace}.{kind}...`, or, for the processes of an endpoint's
revision, `dyn.{namespace}.endpoint.{revision}.{kind}...`. Namespaces, revisions and service names contain no dot, so
that a subject can be split.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dynamo_local.core.errors import ConfigError, UsageError

DEFAULT_NAMESPACE = "dynamo"
_NAMESPACE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,38}[A-Za-z0-9])?")
_SERVICE = re.compile(r"[A-Z][A-Za-z0-9]{0,63}")
_ENDPOINT = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
_REVISION = re.compile(r"(?P<endpoint>[a-z0-9-]+)@(?P<number>[1-9][0-9]{0,8})")
_WATCHER = re.compile(
    r"(?P<namespace>[A-Za-z0-9-]+)_(?:(?P<revision>[a-z0-9-]+@[1-9][0-9]{0,8})_)?"
    r"(?P<service>[A-Z][A-Za-z0-9]*)(?:_(?P<index>[1-9][0-9]{0,8}))?"
)

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
"""Service name of the fork server's watcher (process/forkserver). No service of a graph may take it."""

MACHINERY = frozenset({BUS_SERVICE, FORKSERVER_SERVICE})
"""Services of a server that belong to no graph. They announce no presence."""


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


def check_endpoint(name: str) -> str:
    """Return an endpoint's name, or raise ConfigError. Small letters, digits and inner hyphens, at most 40."""
    if not _ENDPOINT.fullmatch(name):
        rule = "use small letters, digits and inner hyphens, at most 40 characters"
        like = endpoint_name_like(name)
        raise ConfigError(f"{name!r} is no name for an endpoint", f"{rule}, such as {like}" if like else rule)
    return name


def endpoint_name_like(text: str) -> str:
    """A name for an endpoint that is like the text: `qwen3-0-6b` for `Qwen/Qwen3-0.6B`. Empty if nothing is left."""
    last = text.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^a-z0-9]+", "-", last.lower())[:40].strip("-")


@dataclass(frozen=True, order=True)
class Revision:
    """A revision of an endpoint: what was ordered until the next update. Its text is "NAME@NUMBER", such as "chat@2".

    Each revision has subjects, watchers and frontend parts of its own, so that no request, token or KV block can pass
    from one model to another.
    """

    endpoint: str
    number: int

    def __str__(self) -> str:
        return f"{self.endpoint}@{self.number}"


def parse_revision(text: str) -> Revision:
    """Inverse of `str(Revision)`. Raises ConfigError for anything else."""
    match = _REVISION.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is no revision of an endpoint", "expected ENDPOINT@NUMBER")
    return Revision(match["endpoint"], int(match["number"]))


def endpoint_of(revision: str) -> str:
    """The endpoint's name in the text of a revision; empty for an empty one, which stands for the graph's own model."""
    return revision.partition("@")[0]


def revision_in(subject: str) -> str:
    """The text of the endpoint's revision whose processes talk on a subject; empty for the graph's own subjects."""
    parts = subject.split(".", 4)
    return parts[3] if len(parts) > 4 and parts[2] == "endpoint" else ""


@dataclass(frozen=True, order=True)
class Watcher:
    """A watcher's name in parts. The watcher with index 0 has no suffix, and is the template for more.

    `revision`: text of the endpoint's revision that the process belongs to; empty for the graph's own processes.
    """

    namespace: str
    service: str
    index: int = 0
    revision: str = ""

    def __str__(self) -> str:
        base = "_".join(part for part in (self.namespace, self.revision, self.service) if part)
        return base if self.index == 0 else f"{base}_{self.index}"

    @property
    def first(self) -> Watcher:
        """The watcher with index 0 of the same service: all that are configured alike have the same one."""
        return replace(self, index=0)


def parse_watcher(name: str) -> Watcher:
    """Inverse of `str(Watcher)`. Raises ConfigError for anything else."""
    match = _WATCHER.fullmatch(name)
    if match is None:
        raise ConfigError(f"{name!r} is not a watcher's name", "expected NAMESPACE_Service or NAMESPACE_Service_N")
    return Watcher(match["namespace"], match["service"], int(match["index"] or 0), match["revision"] or "")


def short_watcher(name: str) -> str:
    """A watcher's name without its namespace, as tables of one server show it. Any other text is returned as it is.

    No name is both short and full: after a namespace comes a revision, which contains an @, or a service, whose name
    begins with a capital; after a service comes a number.
    """
    match = _WATCHER.fullmatch(name)
    return name if match is None else name.removeprefix(f"{match['namespace']}_")


def select_watcher(given: str, known: Iterable[str], what: str = "worker") -> str:
    """Return the one of the `known` watchers, all of one namespace, that is given in full or without its namespace.

    Raises UsageError, which lists the short names there are, or says that the name is one of another namespace.
    """
    names = {short_watcher(name): name for name in known}
    namespaces = {parse_watcher(name).namespace for name in names.values()}
    match = _WATCHER.fullmatch(given)
    if match is not None and namespaces and match["namespace"] not in namespaces:
        raise UsageError(
            f"{given} belongs to namespace {match['namespace']}, not to {', '.join(namespaces)}",
            f"add --namespace {match['namespace']}, or leave the namespace out of the name",
        )
    short = short_watcher(given)
    if short not in names:
        raise UsageError(f"there is no {what} {given!r}", f"there are: {', '.join(names) or 'none'}")
    return names[short]


@dataclass(frozen=True)
class Subjects:
    """The NATS subjects of one namespace, and the names of its streams. `lease` names the process that listens.

    `revision`: text of an endpoint's revision whose processes talk among themselves; empty for the graph's own. What
    concerns the whole server (events, devices, settings, the planner, endpoints) has one subject for all of them.
    """

    namespace: str
    revision: str = ""

    @property
    def _server(self) -> str:
        return f"dyn.{self.namespace}"

    @property
    def _root(self) -> str:
        return f"{self._server}.endpoint.{self.revision}" if self.revision else self._server

    def presence(self, watcher: str) -> str:
        """The presence of one watcher's process."""
        return f"{self._root}.presence.{watcher}"

    @property
    def presences(self) -> str:
        """Matches the presences of all processes."""
        return f"{self._root}.presence.*"

    @property
    def presences_of_endpoints(self) -> str:
        """Matches the presences in all revisions of all endpoints."""
        return f"{self._server}.endpoint.*.presence.*"

    @property
    def probe(self) -> str:
        """Tells the processes of this revision to publish their presence at once; without one, all processes."""
        return f"{self._root}.probe"

    @property
    def probe_of_all(self) -> str:
        """Tells all processes, those of endpoints included, to publish their presence at once."""
        return f"{self._server}.probe"

    @property
    def revoked(self) -> str:
        """Tells all processes of a lease that is void."""
        return f"{self._root}.revoked"

    @property
    def revoked_of_endpoints(self) -> str:
        """Matches `revoked` of all revisions of all endpoints."""
        return f"{self._server}.endpoint.*.revoked"

    @property
    def endpoints(self) -> str:
        """Orders and questions about endpoints, for the server (core/messages/endpoints.py; request and answer)."""
        return f"{self._server}.endpoints"

    @property
    def board(self) -> str:
        """Tells frontends and the planner that the board of endpoints has changed."""
        return f"{self._server}.board"

    def work(self, lease: str) -> str:
        """From frontends to a worker: submissions, acknowledgements, cancellations."""
        return f"{self._root}.work.{lease}"

    def tokens(self, lease: str) -> str:
        """From workers to a frontend: tokens."""
        return f"{self._root}.tokens.{lease}"

    @property
    def assign(self) -> str:
        """Asks the router for a worker (request and answer)."""
        return f"{self._root}.router.assign"

    @property
    def released(self) -> str:
        """Tells the router that a request has left its worker."""
        return f"{self._root}.router.released"

    @property
    def charges(self) -> str:
        """Tells the router all requests of a frontend that workers have."""
        return f"{self._root}.router.charges"

    def cached(self, lease: str) -> str:
        """Asks a worker how much of a prompt it has cached (request and answer)."""
        return f"{self._root}.cached.{lease}"

    def pin(self, lease: str) -> str:
        """Asks a worker to pin blocks for a reader (request and answer)."""
        return f"{self._root}.pin.{lease}"

    def role(self, lease: str) -> str:
        """Tells a worker to change its role (request and answer)."""
        return f"{self._root}.role.{lease}"

    def parking(self, lease: str) -> str:
        """Tells a worker to park, or to take requests again (request and answer)."""
        return f"{self._root}.parking.{lease}"

    @property
    def holds(self) -> str:
        """Tells the server to hold the claimed devices (request and answer)."""
        return f"{self._server}.holds"

    @property
    def planner(self) -> str:
        """The planner's reports."""
        return f"{self._server}.planner"

    @property
    def events(self) -> str:
        """Events (core/messages/events.py) of processes other than the server, which writes them down."""
        return f"{self._server}.events"

    def migrations(self, lease: str) -> str:
        """Tells a worker to prepare a migration to it (request and answer)."""
        return f"{self._root}.migrations.{lease}"

    def requests(self, lease: str) -> str:
        """Asks a frontend for its requests, or to migrate some (request and answer)."""
        return f"{self._root}.requests.{lease}"

    def claims(self, lease: str) -> str:
        """Asks a frontend for the request of a prefill job (request and answer)."""
        return f"{self._root}.claims.{lease}"

    @property
    def prefill_jobs(self) -> str:
        """The subject of prefill jobs, which the prefill stream stores."""
        return f"{self._root}.prefill.jobs"

    @property
    def prefill_stream(self) -> str:
        """Name of the JetStream stream behind the prefill queue. (Such names contain no dots.)"""
        return "_".join(part for part in ("dyn", self.namespace, self.revision, "prefill") if part)

    @property
    def settings_bucket(self) -> str:
        """Name of the JetStream key-value bucket with the live settings."""
        return f"dyn_{self.namespace}_settings"

    @property
    def setting_changes(self) -> str:
        """Matches the subjects on which NATS publishes changes in that bucket; `>` stands for the setting's name."""
        return f"{self._server}.settings.>"

    def call(self, service: str, endpoint: str) -> str:
        """Begins a call of a service's endpoint. The instances of the service form a queue group."""
        return f"{self._root}.call.{service}.{endpoint}"

    def call_control(self, call_id: str) -> str:
        """From a caller to the instance that serves its call: credit, hang-up."""
        return f"{self._root}.callctl.{call_id}"
