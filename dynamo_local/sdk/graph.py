"""Loads a graph from "module:Service": its services, and which service calls which."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType

from dynamo_local.core.errors import GraphError
from dynamo_local.sdk.service import ServiceSpec, is_service, links_of, spec_of

_EXAMPLES = "examples.llm"


@dataclass(frozen=True)
class Graph:
    """A root service and all services that it reaches by dependencies in use.

    `services` are ordered by dependency, then by declaration; the root is the last. `edges`: for each service, the
    names of the services that it calls.
    """

    target: str
    services: tuple[type, ...]
    edges: Mapping[str, tuple[str, ...]]

    @property
    def root(self) -> type:
        return self.services[-1]

    @property
    def specs(self) -> tuple[ServiceSpec, ...]:
        return tuple(spec_of(cls) for cls in self.services)


def load_graph(target: str) -> Graph:
    """Import "module:Service" and follow its dependencies.

    A service at either end of a link made by that module keeps only its linked dependencies; a service that the module
    does not link keeps all. Services that the root then does not reach are left out. Raises GraphError.
    """
    root = import_service(target)
    return build_graph(target, root, links_of(target.partition(":")[0]))


def build_graph(target: str, root: type, links: Iterable[tuple[type, type]]) -> Graph:
    """Build the graph of a root service and links. The part of `load_graph` that imports nothing. Raises GraphError."""
    linked = tuple(links)
    ends = {cls for edge in linked for cls in edge}
    classes: dict[str, type] = {}
    edges: dict[str, tuple[str, ...]] = {}
    waiting = [root]
    while waiting:
        cls = waiting.pop()
        spec = spec_of(cls)
        if spec.name in classes:
            if classes[spec.name] is not cls:
                raise GraphError(f"two services of the graph are called {spec.name}", "rename one of the classes")
            continue
        used = [other for other in spec.dependencies.values() if cls not in ends or (cls, other) in linked]
        classes[spec.name] = cls
        edges[spec.name] = tuple(dict.fromkeys(spec_of(other).name for other in used))
        waiting.extend(used)
    order = dependency_order(spec_of(root).name, edges)
    return Graph(target, tuple(classes[name] for name in order), MappingProxyType(edges))


def dependency_order(root: str, edges: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the root and all services that it reaches, dependencies first. Raises GraphError for a cycle."""
    order: dict[str, None] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            cycle = " -> ".join((*path[path.index(name) :], name))
            raise GraphError(f"the services depend on each other in a circle: {cycle}", "remove one depends()")
        if name not in order:
            for other in edges.get(name, ()):
                visit(other, (*path, name))
            order[name] = None

    visit(root, ())
    return tuple(order)


def import_service(target: str) -> type:
    """Import the service class "module:Class", also from the working directory. Raises GraphError."""
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise GraphError(f"{target!r} names no service", "write MODULE:Service")
    module = _import(module_name)
    found = getattr(module, name, None)
    if isinstance(found, type) and is_service(found):
        return found
    services = sorted(other for other, value in vars(module).items() if is_service(value))
    cause = f"module {module_name} has no {name}" if found is None else f"{target} is not decorated with @service"
    raise GraphError(cause, f"services there: {', '.join(services) or 'none'}{_guess(name, services)}")


def target_of(cls: type) -> str:
    """Return "module:Class" for a service class, the inverse of `import_service`. Raises GraphError if another process
    could not import the class by that name."""
    if "." in cls.__qualname__:
        raise GraphError(f"service {cls.__qualname__} cannot be imported by name", "define it at the top of its module")
    return f"{cls.__module__}:{cls.__name__}"


def make_cwd_importable() -> None:
    """Make modules of the working directory importable, as `python -m` does."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def _import(name: str) -> ModuleType:
    make_cwd_importable()
    try:
        return importlib.import_module(name)
    except GraphError:
        raise
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            raise GraphError(f"there is no module {missing}", _full_name(name) or _siblings(missing)) from error
        raise GraphError(
            f"module {name} needs {missing}, which is not installed", "install it in the Python environment of `dynamo`"
        ) from error
    except (Exception, SystemExit) as error:
        # The module is the user's and may raise anything. The error message names it, without our traceback.
        cause = " ".join(str(error).split())
        raise GraphError(
            f"module {name} cannot be imported: {type(error).__name__}: {cause}",
            f"`python -c 'import {name}'` shows where",
        ) from error


def _full_name(name: str) -> str | None:
    """A remedy if the module is one of the examples, named as from their folder, as Dynamo's documentation does."""
    for package in (_EXAMPLES, f"{_EXAMPLES}.graphs"):
        with suppress(ModuleNotFoundError):
            if importlib.util.find_spec(f"{package}.{name}") is not None:
                return f"did you mean {package}.{name}?"
    return None


def _siblings(missing: str) -> str:
    parent, _, last = missing.rpartition(".")
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else [str(Path.cwd())]
    names = sorted(module.name for module in pkgutil.iter_modules(path) if not module.name.startswith("_"))
    where = f"package {parent}" if parent else "the working directory"
    return f"modules in {where}: {', '.join(names) or 'none'}{_guess(last, names)}"


def _guess(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""
