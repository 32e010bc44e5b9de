"""The registry of endpoints: what was ordered, and which revisions came of it. Pure; on disk it is kept by
`state.endpoints.registry`.

    create    (no entry)      -> revision 1
    update    only bounds     -> the same revision
              anything else   -> the next revision; the one that answers is remembered until the update is settled
    settle    update under way -> the new revision stays, the earlier one is forgotten
    revert    update under way -> the earlier revision and its spec are back; the number is not given again
    delete    entry           -> (no entry)

An adapter has an entry like any other, and stays only as long as its base.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from dynamo_local.core.documents import Convert, NewerDocumentError, as_document, from_versions
from dynamo_local.core.endpoints.checks import runs_differently, with_bounds_of
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.endpoints.values import shown
from dynamo_local.core.errors import ConfigError, EndpointAbsentError, EndpointConflictError, StateError
from dynamo_local.core.suggestions import suggest

SCHEMA_VERSION = 3
"""1: before `park_after_s`, `sleep_after_s` and a minimum of no workers. 2: before `adapter_room`."""

MOST_ENDPOINTS = 1000

CONVERSIONS: Mapping[int, Convert] = MappingProxyType({1: dict, 2: dict})
"""By version, what makes the next one of it. What versions 2 and 3 have more may be absent."""


class Earlier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The revision that an update under way is to replace, and what it runs."""

    spec: EndpointSpec
    revision: int


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """An endpoint as ordered. Times are of the wall clock, in seconds since 1970.

    `revision`: number of the revision that runs `spec`. `earlier`: the one that answers while an update is under way.
    `last_revision`: the highest number given so far. `order`: grows with each endpoint that is created.
    """

    spec: EndpointSpec
    revision: int
    last_revision: int
    order: int
    created_at: float
    updated_at: float
    earlier: Earlier | None = None

    @property
    def revisions(self) -> tuple[int, ...]:
        """Numbers of the revisions that may run, the one that is to stay first."""
        return (self.revision,) if self.earlier is None else (self.revision, self.earlier.revision)


class Registry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All endpoints by name, in the order of their creation. Change it by the functions below.

    `next_order`: the `order` of the next endpoint.
    """

    entries: dict[str, Entry] = {}
    next_order: int = 1

    def __post_init__(self) -> None:
        orders = [entry.order for entry in self.entries.values()]
        if sorted(set(orders)) != orders or any(not 1 <= order < self.next_order for order in orders):
            raise StateError("the endpoints are not in the order of their creation")
        for name, entry in self.entries.items():
            _check_entry(name, entry)
            self._check_base(entry.spec)

    def _check_base(self, spec: EndpointSpec) -> None:
        if spec.adapter_of is not None and spec.adapter_of not in self.entries:
            raise StateError(f"adapter {spec.name} has no base: there is no endpoint {spec.adapter_of}")
        if spec.adapter_of is not None and self.entries[spec.adapter_of].spec.adapter_of is not None:
            raise StateError(f"the base of adapter {spec.name} is an adapter itself")

    def entry(self, name: str) -> Entry:
        """The endpoint of that name. Raises EndpointAbsentError, which names similar ones."""
        if name not in self.entries:
            known = suggest(name[:60], self.entries, "there are:")
            raise EndpointAbsentError(f"there is no endpoint {shown(name)}", known)
        return self.entries[name]

    def adapters_of(self, base: str) -> tuple[Entry, ...]:
        """The endpoints that are adapters of that one."""
        return tuple(entry for entry in self.entries.values() if entry.spec.adapter_of == base)


def create(registry: Registry, spec: EndpointSpec, now: float) -> Registry:
    """Add an endpoint. Raises EndpointConflictError for a name that is taken, ConfigError for an adapter whose base
    does not exist or is an adapter."""
    if spec.name in registry.entries:
        raise EndpointConflictError(
            f"there is an endpoint {spec.name} already", f"change it: dynamo endpoint update {spec.name} --set ..."
        )
    if len(registry.entries) >= MOST_ENDPOINTS:
        raise EndpointConflictError(f"there are {MOST_ENDPOINTS} endpoints already", "delete some")
    _check_adapter(registry, spec)
    order = registry.next_order
    entry = Entry(spec=spec, revision=1, last_revision=1, order=order, created_at=now, updated_at=now)
    return Registry({**registry.entries, spec.name: entry}, order + 1)


def update(registry: Registry, spec: EndpointSpec, now: float) -> Registry:
    """Give an endpoint another spec, and another revision if processes of the present one cannot serve it.

    An update of an update that is under way replaces it: the revision that answers stays remembered. Orders of what
    that one runs bring it back. Raises EndpointAbsentError.
    """
    entry = registry.entry(spec.name)
    if spec == entry.spec:
        return registry
    if entry.spec.adapter_of != spec.adapter_of:
        raise ConfigError(
            f"endpoint {spec.name}: adapter_of cannot be changed", "create another endpoint, and delete this one"
        )
    entry = msgspec.structs.replace(entry, updated_at=now)
    return _with(registry, _updated(entry, spec))


def renew(registry: Registry, name: str, revision: int, now: float) -> Registry:
    """Give an endpoint another revision with the same spec, since its model's files are others. Changes nothing if the
    revision is not the endpoint's any more. Raises EndpointAbsentError."""
    entry = registry.entry(name)
    if entry.revision != revision:
        return registry
    number, earlier = entry.last_revision + 1, entry.earlier or Earlier(entry.spec, revision)
    changed = msgspec.structs.replace(entry, revision=number, last_revision=number, earlier=earlier, updated_at=now)
    return _with(registry, changed)


def settle(registry: Registry, name: str, revision: int) -> Registry:
    """Record that the revision of an update under way answers, and the earlier one is gone. Changes nothing if it is
    not the endpoint's revision any more. Raises EndpointAbsentError."""
    entry = registry.entry(name)
    if entry.revision != revision or entry.earlier is None:
        return registry
    return _with(registry, msgspec.structs.replace(entry, earlier=None))


def revert(registry: Registry, name: str, revision: int, now: float) -> Registry:
    """Record that the revision of an update under way has failed: the earlier spec and revision are back. Changes
    nothing if it is not the endpoint's revision any more, or has no earlier one. Raises EndpointAbsentError."""
    entry = registry.entry(name)
    earlier = entry.earlier
    if entry.revision != revision or earlier is None:
        return registry
    back = msgspec.structs.replace(entry, spec=earlier.spec, revision=earlier.revision, earlier=None, updated_at=now)
    return _with(registry, back)


def delete(registry: Registry, name: str) -> Registry:
    """Remove an endpoint. Raises EndpointAbsentError, and EndpointConflictError if it is the base of adapters."""
    registry.entry(name)
    adapters = [entry.spec.name for entry in registry.adapters_of(name)]
    if adapters:
        raise EndpointConflictError(
            f"endpoint {name} is the base of adapters: {', '.join(adapters)}", "delete those first"
        )
    return Registry({key: entry for key, entry in registry.entries.items() if key != name}, registry.next_order)


def ordered(registry: Registry, specs: Iterable[EndpointSpec], now: float) -> Registry:
    """The registry with the endpoints of a file: created, or updated by name, bases before adapters. The others stay,
    and so does room for adapters that a spec does not name.

    Raises ConfigError for a name twice, and as `create` and `update`.
    """
    wanted = sorted(specs, key=lambda spec: spec.adapter_of is not None)
    names = [spec.name for spec in wanted]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"endpoint {twice} is given twice", "rename one of them")
    for spec in wanted:
        if (entry := registry.entries.get(spec.name)) is None:
            registry = create(registry, spec, now)
            continue
        room = spec.adapter_room or entry.spec.adapter_room
        registry = update(registry, msgspec.structs.replace(spec, adapter_room=room), now)
    return registry


def to_document(registry: Registry) -> dict[str, Any]:
    """The registry as JSON has it, with its version."""
    return as_document(registry, SCHEMA_VERSION)


def from_document(document: Any, conversions: Mapping[int, Convert] = CONVERSIONS) -> tuple[Registry, int]:
    """Inverse of `to_document`, also for older versions. Returns the registry and the version that it had.

    Raises StateError for anything else, and NewerRegistryError for what a later release has written.
    """
    return from_versions(document, Registry, SCHEMA_VERSION, conversions, NewerRegistryError)


class NewerRegistryError(NewerDocumentError):
    """The registry was written by a later release."""

    def __init__(self, version: int) -> None:
        super().__init__(
            f"the registry of endpoints has version {version}, and this release reads {SCHEMA_VERSION} at most",
            "use the release that wrote it, or drop the endpoints by --forget",
        )


def _updated(entry: Entry, spec: EndpointSpec) -> Entry:
    replaced = msgspec.structs.replace
    if not runs_differently(entry.spec, spec):
        earlier = entry.earlier
        if earlier is not None:
            earlier = replaced(earlier, spec=with_bounds_of(earlier.spec, spec))
        return replaced(entry, spec=spec, earlier=earlier)
    earlier = entry.earlier or Earlier(entry.spec, entry.revision)
    if not runs_differently(earlier.spec, spec):
        return replaced(entry, spec=spec, revision=earlier.revision, earlier=None)
    number = entry.last_revision + 1
    return replaced(entry, spec=spec, revision=number, last_revision=number, earlier=earlier)


def _check_adapter(registry: Registry, spec: EndpointSpec) -> None:
    if spec.adapter_of is None:
        return
    base = registry.entries.get(spec.adapter_of)
    if base is None:
        bases = [name for name, entry in registry.entries.items() if entry.spec.adapter_of is None]
        raise ConfigError(
            f"endpoint {spec.name}: its base {spec.adapter_of} does not exist",
            suggest(spec.adapter_of, bases, "endpoints are:"),
        )
    if base.spec.adapter_of is not None:
        raise ConfigError(
            f"endpoint {spec.name}: its base {spec.adapter_of} is an adapter itself",
            f"write adapter_of: {base.spec.adapter_of}",
        )


def _check_entry(name: str, entry: Entry) -> None:
    specs = [entry.spec] if entry.earlier is None else [entry.spec, entry.earlier.spec]
    if any((spec.name, spec.adapter_of) != (name, entry.spec.adapter_of) for spec in specs):
        raise StateError(f"entry {name} is of another endpoint")
    numbers = entry.revisions
    if len(set(numbers)) < len(numbers) or min(numbers) < 1 or max(numbers) > entry.last_revision:
        raise StateError(f"endpoint {name} has impossible revisions: {', '.join(map(str, numbers))}")
    if entry.earlier is not None and entry.revision != entry.last_revision:
        raise StateError(f"the update of endpoint {name} has no revision of its own")


def _with(registry: Registry, entry: Entry) -> Registry:
    return Registry({**registry.entries, entry.spec.name: entry}, registry.next_order)
