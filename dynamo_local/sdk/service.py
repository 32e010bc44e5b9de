"""The decorators that make a class a service, and the specification that they record.

`@service` adds two attributes to the class and changes nothing else: `__dynamo__`, the immutable `ServiceSpec`, and the
class method `link`.
"""

from __future__ import annotations

import collections.abc
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints, overload

from dynamo_local.core.errors import ConfigError, GraphError
from dynamo_local.core.names import DEFAULT_NAMESPACE, MACHINERY, check_namespace, check_service
from dynamo_local.sdk.client import ServiceClient
from dynamo_local.sdk.config.schema import ConfigSchema, SchemaTable, schema_of
from dynamo_local.sdk.resources import DeviceUse, Resources

# Records `A.link(B)`: which of its declared dependencies a graph uses.
#
# A graph consists of the links of one module. Links are recorded under the module whose code calls `link`, so that two
# graph modules which link the same service classes are independent, in whatever order they are imported.

_links: dict[str, dict[tuple[type, type], None]] = {}
"""Links as (source, target), by module. The inner dict serves as an ordered set."""


def link(cls: type, other: Any) -> Any:
    """Use the dependency of `cls` on `other` in the graph of the calling module. Returns `other`, for chains.

    Raises GraphError if `cls` does not depend on `other`.
    """
    declared = list(vars(cls)["__dynamo__"].dependencies.values()) if "__dynamo__" in vars(cls) else []
    if other not in declared:
        names = ", ".join(target.__name__ for target in declared) or "no other service"
        target = getattr(other, "__name__", repr(other))
        raise GraphError(f"{cls.__name__} cannot be linked to {target}", f"{cls.__name__} depends on {names}")
    module = sys._getframe(1).f_globals.get("__name__", "__main__")
    _links.setdefault(module, {})[(cls, other)] = None
    return other


def links_of(module: str) -> tuple[tuple[type, type], ...]:
    """Return the links made by the code of this module, in order."""
    return tuple(_links.get(module, {}))


class Service:
    """Optional base class of services. Lets type checkers see `link`, which `@service` adds to every class."""

    link: ClassVar[Any]


__all__ = [
    "DeviceUse",
    "EndpointSpec",
    "Resources",
    "Service",
    "ServiceSpec",
    "async_on_shutdown",
    "async_on_start",
    "bind_clients",
    "depends",
    "endpoint",
    "is_service",
    "service",
    "spec_of",
]

_C = TypeVar("_C")
_F = TypeVar("_F", bound=Callable[..., Any])

Devices = Callable[[Mapping[str, Any]], DeviceUse]
Preload = Callable[[Mapping[str, Any]], str | None]
Rewrite = Callable[[Mapping[str, Any]], tuple[Mapping[str, Any], tuple[str, ...]]]

_ENDPOINT = "__dynamo_endpoint__"
_HOOK = "__dynamo_hook__"
_CLIENTS = "__dynamo_clients__"

DEFAULT_ROLE = "service"


@dataclass(frozen=True)
class EndpointSpec:
    """An endpoint. `name`: on the bus. `method`: name of the method. `streams`: whether the method yields replies."""

    name: str
    method: str
    streams: bool
    takes_request: bool


@dataclass(frozen=True)
class ServiceSpec:
    """The specification of a service, as `@service` recorded it. Mappings are read-only."""

    name: str
    namespace: str
    role: str
    role_beside: Mapping[str, str]
    """Other roles of the service: by the role of another service, the role beside such a service in a graph."""
    resources: Resources
    devices: Devices
    """Returns the use of a worker's devices for a configuration."""
    workers: int
    preload: Preload
    """Returns the module to import once for all processes, for a configuration; None: no module."""
    schema: ConfigSchema
    endpoints: Mapping[str, EndpointSpec]
    """Endpoints by name on the bus."""
    dependencies: Mapping[str, type]
    """Service classes by attribute name."""
    on_start: tuple[str, ...]
    on_shutdown: tuple[str, ...]
    rewrite: Rewrite | None = None
    """Rewrites configurations of graphs of which this service is the root; None: they are taken as they are."""


class Dependency:
    """A declared dependency. Reading the attribute of a running service gives the client of the other service."""

    def __init__(self, target: type) -> None:
        self.target = target
        self._owner = "a service"
        self._name = "it"

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner.__name__, name

    @overload
    def __get__(self, instance: None, owner: type) -> Dependency: ...
    @overload
    def __get__(self, instance: object, owner: type) -> ServiceClient: ...
    def __get__(self, instance: object | None, owner: type) -> Dependency | ServiceClient:
        if instance is None:
            return self
        clients: Mapping[str, ServiceClient] | None = vars(instance).get(_CLIENTS)
        what = f"{self._owner}.{self._name}, the client of {self.target.__name__},"
        if clients is None:
            raise GraphError(f"{what} exists in a running graph only", "start it with `dynamo serve`")
        if self._name not in clients:
            raise GraphError(f"{what} is not linked in this graph", f"link {self._owner} to {self.target.__name__}")
        return clients[self._name]


def depends(target: type) -> Dependency:
    """Declare that a service calls another one. Raises GraphError if `target` is no service."""
    if not is_service(target):
        raise GraphError(
            f"depends({getattr(target, '__name__', target)!s}): not a service", "decorate it with @service"
        )
    return Dependency(target)


def endpoint(name: str | None = None) -> Callable[[_F], _F]:
    """Mark a method that other services may call: a coroutine, or an async generator for a stream of replies.

    The method takes at most one argument, the request. Requests and replies must be encodable by msgpack. msgspec
    converts annotated ones to their type. Raises GraphError for other methods.
    """

    def mark(method: _F) -> _F:
        streams = inspect.isasyncgenfunction(method)
        if not (streams or inspect.iscoroutinefunction(method)):
            raise GraphError(f"endpoint {method.__qualname__} is not asynchronous", "write it as `async def`")
        arguments = len(inspect.signature(method).parameters) - 1
        if arguments not in (0, 1):
            raise GraphError(f"endpoint {method.__qualname__} takes {arguments} arguments", "take one request, or none")
        spelled = name or method.__name__
        if not spelled.replace("_", "").replace("-", "").isalnum():
            raise GraphError(f"endpoint name {spelled!r} is not valid", "use letters, digits, _ and -")
        setattr(method, _ENDPOINT, EndpointSpec(spelled, method.__name__, streams, arguments == 1))
        return method

    return mark


def async_on_start(method: _F) -> _F:
    """Mark a coroutine method to run before the service is ready. Several methods run in order of definition."""
    return _mark_hook(method, "start")


def async_on_shutdown(method: _F) -> _F:
    """Mark a coroutine method to run when the service ends, after its last call."""
    return _mark_hook(method, "shutdown")


def _mark_hook(method: _F, when: str) -> _F:
    if not inspect.iscoroutinefunction(method):
        raise GraphError(f"{method.__qualname__} is not a coroutine method", "write it as `async def`")
    setattr(method, _HOOK, when)
    return method


def service(
    *,
    namespace: str = DEFAULT_NAMESPACE,
    resources: Mapping[str, int | float | str] | Resources | None = None,
    devices: Devices | None = None,
    workers: int = 1,
    config: type | ConfigSchema | None = None,
    role: str = DEFAULT_ROLE,
    role_beside: Mapping[str, str] | None = None,
    preload: str | Preload | None = None,
    rewrite: Rewrite | None = None,
) -> Callable[[type[_C]], type[_C]]:
    """Make a class a service of the same name. Configuration may override `workers` and `resources`.

    `role_beside`: by the role of another service, the role that this service has in a graph with such a service. For
    example, an "aggregated" worker, which serves whole requests, only decodes beside prefill workers.

    `preload` names a module whose import is slow: it is imported once for all processes of the graph
    (process/forkserver). A function is called with the service's configuration.

    `devices` is called with the service's configuration, and returns the use of a worker's devices.

    `rewrite` is called with each configuration (sections by name, not checked yet) of a graph whose root this service
    is. It returns the configuration to use, and notes for the user. So a service can take keys of another project.

    `config` declares the keys of the service: a dataclass, a ConfigSchema, or None for no keys. Raises GraphError.
    """

    def decorate(cls: type[_C]) -> type[_C]:
        try:
            spec = ServiceSpec(
                name=_check_name(cls.__name__),
                namespace=check_namespace(namespace),
                role=role,
                role_beside=MappingProxyType(dict(role_beside or {})),
                resources=Resources.parse(resources),
                devices=devices or (lambda _: DeviceUse()),
                workers=_check_workers(workers),
                preload=preload if callable(preload) else lambda _: preload,
                schema=_schema(config),
                endpoints=MappingProxyType(_endpoints(cls)),
                dependencies=MappingProxyType({name: item.target for name, item in _members(cls, Dependency)}),
                on_start=_hooks(cls, "start"),
                on_shutdown=_hooks(cls, "shutdown"),
                rewrite=rewrite,
            )
        except (ConfigError, ValueError) as error:
            raise GraphError(f"service {cls.__name__}: {error}") from error
        cls.__dynamo__ = spec  # type: ignore[attr-defined]
        cls.link = classmethod(link)  # type: ignore[attr-defined]
        return cls

    return decorate


def is_service(candidate: object) -> bool:
    """Return whether the class itself is decorated with `@service`; a subclass needs a decorator of its own."""
    return isinstance(candidate, type) and "__dynamo__" in vars(candidate)


def spec_of(cls: type) -> ServiceSpec:
    """Return the specification of a service class. Raises GraphError for other classes."""
    if not is_service(cls):
        raise GraphError(f"{getattr(cls, '__name__', cls)!s} is not a service", "decorate it with @service")
    return vars(cls)["__dynamo__"]  # type: ignore[no-any-return]


def bind_clients(instance: object, clients: Mapping[str, ServiceClient]) -> None:
    """Give a service object its clients, by attribute name. Its process calls this before `__init__`."""
    vars(instance)[_CLIENTS] = MappingProxyType(dict(clients))


def _check_name(name: str) -> str:
    if name in MACHINERY:
        raise ValueError("the name is reserved")
    return check_service(name)


def _check_workers(workers: object) -> int:
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ValueError(f"workers must be a whole number of at least 1, not {workers!r}")
    return workers


def _schema(config: type | ConfigSchema | None) -> ConfigSchema:
    if config is None:
        return SchemaTable({})
    if isinstance(config, type):
        if not is_dataclass(config):
            raise ValueError(f"config={config.__name__} is neither a dataclass nor a ConfigSchema")
        return schema_of(config)
    return config


def _members(cls: type, kind: type[_C]) -> Iterator[tuple[str, _C]]:
    """Yield the attributes of that kind, base classes first, in order of definition, without overridden ones."""
    names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
    for name in names:
        member = inspect.getattr_static(cls, name)
        if isinstance(member, kind):
            yield name, member


def _endpoints(cls: type) -> dict[str, EndpointSpec]:
    endpoints: dict[str, EndpointSpec] = {}
    for _, method in _members(cls, object):
        spec: EndpointSpec | None = getattr(method, _ENDPOINT, None)
        if spec is None:
            continue
        if spec.name in endpoints:
            raise ValueError(f"two endpoints are called {spec.name}")
        endpoints[spec.name] = spec
    return endpoints


def _hooks(cls: type, when: str) -> tuple[str, ...]:
    return tuple(name for name, method in _members(cls, object) if getattr(method, _HOOK, None) == when)


# Reads the types of requests and replies from an endpoint's annotations; both ends of a call convert to them.

_STREAMS = (
    collections.abc.AsyncIterator,
    collections.abc.AsyncIterable,
    collections.abc.AsyncGenerator,
)


def request_type(cls: type, endpoint: EndpointSpec) -> Any:
    """Return the annotation of the endpoint's argument, or Any. Raises GraphError."""
    hints = _hints(cls, endpoint)
    hints.pop("return", None)
    return next(iter(hints.values()), Any)


def reply_type(cls: type, endpoint: EndpointSpec) -> Any:
    """Return the type of one reply, or Any if it is not annotated. Raises GraphError."""
    annotation = _hints(cls, endpoint).get("return", Any)
    if not endpoint.streams:
        return annotation
    arguments = get_args(annotation)
    return arguments[0] if get_origin(annotation) in _STREAMS and arguments else Any


def _hints(cls: type, endpoint: EndpointSpec) -> dict[str, Any]:
    try:
        return get_type_hints(getattr(cls, endpoint.method), include_extras=True)
    except NameError as error:
        raise GraphError(
            f"annotation of {cls.__name__}.{endpoint.method} cannot be evaluated: {error}",
            "import the type at run time, not under TYPE_CHECKING",
        ) from error
