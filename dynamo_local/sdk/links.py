"""`A.link(B)`: which of the declared dependencies a graph uses.

A graph is what one module links. Links are therefore recorded under the module whose code called `link`, and
`links_of(module)` gives that module's links and no others: two graph modules that link the same service
classes do not see each other, however often and in whatever order they are imported.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from dynamo_local.core.errors import GraphError

_links: dict[str, dict[tuple[type, type], None]] = {}
"""For each module, its edges (source, target); a dict for its order."""


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
    """The edges that the code of this module linked, in order."""
    return tuple(_links.get(module, {}))


class Service:
    """Optional base class: lets type checkers see `link`, which `@service` puts on every class."""

    link: ClassVar[Any]
