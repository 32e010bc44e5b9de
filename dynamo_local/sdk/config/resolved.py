"""Resolved configuration: what services are given in the end, in statefile and environment, with its secrets masked
where it is printed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo_local.core.errors import DecodeError, GraphError

# Masks secrets in configuration that is printed.
#
# Configuration may hold secrets: API keys in `ServiceArgs.envs`, passwords in URLs. Code that prints configuration must
# use this module. When in doubt it masks: a harmless value under a suspicious name is masked too.

MASK = "***"

_WORDS = frozenset({"key", "auth", "pass", "pwd", "pat"})
_ENDINGS = ("token", "password", "passwd", "passphrase", "secret", "apikey", "credential", "credentials")
_USERINFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_MAX_SHOWN = 80


def looks_secret(name: str) -> bool:
    """Return whether a variable or key of this name probably holds a secret: HF_TOKEN does, max-tokens does not."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    return any(word in _WORDS or word.endswith(_ENDINGS) for word in words)


def redact(name: str, value: Any) -> Any:
    """Return the value with secrets masked: values under suspicious names, and user names and passwords in URLs."""
    secret = looks_secret(name)
    if isinstance(value, Mapping):
        return {key: redact(name if secret else str(key), item) for key, item in value.items()}
    if secret and not isinstance(value, bool | None):
        return MASK
    if isinstance(value, list | tuple):
        return [redact("", item) for item in value]
    if isinstance(value, str):
        return _USERINFO.sub(MASK, value)
    return value


def shown(name: str, value: Any) -> str:
    """Return the value as error messages show it: redacted, on one line, and shortened."""
    text = repr(redact(name, value))
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


# A resolved graph: for each service its number of workers, devices, environment and configuration.
#
# `resolve()` makes a resolved graph. The supervisor plans watchers from it, and every service process reads its part of
# it from `graph.json`. The configuration may hold secrets: show a graph only through `redacted()`.

SCHEMA_VERSION = 1


class ResolvedService(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A service of a resolved graph.

    `target`: "module:Class" of the service class. `gpu`: number of devices of each worker, or its share of one. `cpu`:
    number of cores of each worker, 0 if not given. `virtual`: the workers compute nothing on their devices. `config`:
    the given keys in kebab-case, without defaults. `depends_on`: the services whose clients a process gets. `preload`:
    the module that the fork server imports.
    """

    name: str
    target: str
    role: str
    workers: int
    gpu: float
    cpu: float
    envs: dict[str, str]
    config: dict[str, Any]
    depends_on: tuple[str, ...]
    preload: str | None = None
    virtual: bool = False


class ResolvedGraph(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A graph as it is started. `services` are ordered by dependency: the root is the last. `notes` tell the user which
    keys were replaced or ignored."""

    target: str
    namespace: str
    services: tuple[ResolvedService, ...]
    schema_version: int = SCHEMA_VERSION
    notes: tuple[str, ...] = ()

    @property
    def root(self) -> ResolvedService:
        """The service that the target names, to which clients connect."""
        return self.services[-1]

    def service(self, name: str) -> ResolvedService:
        """Return the service of that name. Raises GraphError if the graph has none."""
        for candidate in self.services:
            if candidate.name == name:
                return candidate
        raise GraphError(f"the graph has no service {name!r}", f"it has {', '.join(s.name for s in self.services)}")

    def redacted(self) -> ResolvedGraph:
        """Return the graph with secrets masked."""
        return msgspec.structs.replace(self, services=tuple(_redacted(service) for service in self.services))

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2)

    @classmethod
    def from_json(cls, data: bytes) -> ResolvedGraph:
        """Read the output of `to_json`. Raises DecodeError for anything else."""
        try:
            graph = msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise DecodeError(f"not a resolved graph: {error}") from error
        if graph.schema_version != SCHEMA_VERSION or not graph.services:
            raise DecodeError(
                f"resolved graph, version {graph.schema_version}, {len(graph.services)} services",
                f"this release reads version {SCHEMA_VERSION} with at least one service",
            )
        return graph


def _redacted(service: ResolvedService) -> ResolvedService:
    envs = {name: redact(name, value) for name, value in service.envs.items()}
    return msgspec.structs.replace(service, envs=envs, config=redact("", service.config))
