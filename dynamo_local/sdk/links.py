"""Records `A.link(B)`: which of its declared dependencies a graph uses.

A graph consists of the links of one module. Links are recorded under the module whose code calls `link`, so that two
graph modules which link the same service classes are independent, in whatever order they are imported.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from dynamo_local.core.errors import GraphError

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
