"""The names by which requests ask for an endpoint's model. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import EndpointConflictError

SERVED_NAME = "served-model-name"


def served_names(spec: EndpointSpec) -> tuple[str, ...]:
    """The endpoint's own name, and those that its arguments give beside it."""
    given = spec.args.get(SERVED_NAME) or ()
    others = (given,) if isinstance(given, str) else given
    return tuple(dict.fromkeys((spec.name, *map(str, others))))


def check_names(spec: EndpointSpec, others: Iterable[EndpointSpec], own: Iterable[str]) -> None:
    """Raise EndpointConflictError if a request could mean another endpoint or the server's own model as well. `own`:
    names of the latter."""
    taken = {name: f"endpoint {other.name}" for other in others for name in served_names(other)}
    taken |= dict.fromkeys(own, "the server's own model")
    for name in served_names(spec):
        if name in taken:
            raise EndpointConflictError(
                f"endpoint {spec.name}: {taken[name]} is served as {name} already", "choose another name"
            )
