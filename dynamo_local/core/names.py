"""Names that two processes must agree on, each spelled once: namespaces, services, revisions, watchers, environment
variables. Builders stand beside their parsers. The subjects of the bus are in `subjects`."""

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

LOCAL_NODE = "local"
"""The node of a graph whose processes are all on one machine."""

_NODE_SHOWN = 12
"""Characters of a node's name that tell it from others: those of Ray have 56."""

_OF_WORKER = re.compile(r"(?:[A-Za-z0-9-]+_)?(?P<endpoint>[a-z0-9-]+)@[0-9]+_.*")
_NAMED_ENDPOINT = re.compile(r"[a-z0-9-]+")
_NODE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")

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


def check_node(node: str) -> str:
    """Return the node's name, or raise ConfigError. Letters, digits and inner hyphens, dots and underscores, at most
    128."""
    if not _NODE.fullmatch(node):
        rule = "use letters, digits and inner hyphens, dots and underscores, at most 128 characters"
        raise ConfigError(f"node {node!r} is not valid", rule)
    return node


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


MAIN = "main"
"""The endpoint of the workers that a graph has itself. Their watchers have no revision in their names."""

FIRST_OF_MAIN = str(Revision(MAIN, 1))


def endpoint_of(revision: str) -> str:
    """The endpoint's name in the text of a revision; empty for an empty one, that of processes which serve no model of
    their own."""
    return revision.partition("@")[0]


def endpoint_named(name: str) -> str:
    """The endpoint that a name in a command stands for, or whose worker it names; empty for a service of the graph and
    its processes. Names of services have a capital, those of endpoints have none."""
    of_worker = _OF_WORKER.fullmatch(name)
    if of_worker is not None:
        return of_worker["endpoint"]
    return name if _NAMED_ENDPOINT.fullmatch(name) else ""


@dataclass(frozen=True, order=True)
class Watcher:
    """A watcher's name in parts. The watcher with index 0 has no suffix, and is the template for more.

    `revision`: text of the revision, where the name has one; those of the graph's processes have none. Which revision
    a worker serves is told by its entry in the statefile, and by its presence.
    """

    namespace: str
    service: str
    index: int = 0
    revision: str = ""

    @classmethod
    def of(cls, namespace: str, service: str, index: int, revision: str) -> Watcher:
        """The watcher of a process that serves this revision; empty: of one that serves no model of its own."""
        return cls(namespace, service, index, "" if endpoint_of(revision) == MAIN else revision)

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


def check_watcher(watcher: Watcher) -> None:
    """Raise ConfigError for parts that are not those of a watcher's name, as a message may bring them."""
    if parse_watcher(str(watcher)) != watcher:
        raise ConfigError(f"{watcher} is not a watcher's name in parts")


def shown_node(node: str) -> str:
    """As much of a node's name as people need."""
    return node[:_NODE_SHOWN]


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
