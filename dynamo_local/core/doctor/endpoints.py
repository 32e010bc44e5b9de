"""The registries of endpoints, and endpoints that have failed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dynamo_local.core.doctor.finding import Finding, fail, ok, warn


@dataclass(frozen=True)
class EndpointsFacts:
    """The endpoints of one namespace.

    `number`: in the registry. `trouble`: why the registry cannot be read; `remedy`: what helps. `damaged`: the one of
    its two files that is damaged or missing, with the reason. `open_files`: those that other users can read or write.
    `failed`: endpoints of the running server that have failed, with their reasons.
    """

    namespace: str
    number: int = 0
    trouble: str | None = None
    remedy: str = ""
    damaged: str | None = None
    open_files: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()


def check_endpoints(found: tuple[EndpointsFacts, ...]) -> Iterator[Finding]:
    """Findings for each namespace with a registry; none for the others."""
    for facts in found:
        yield from _registry(facts)
        for name, reason in facts.failed:
            yield warn(
                f"endpoint {name}",
                f"has failed: {reason}",
                f"`dynamo endpoint update {name} --namespace {facts.namespace}` changes it",
            )


def _registry(facts: EndpointsFacts) -> Iterator[Finding]:
    check = f"endpoints {facts.namespace}"
    if facts.trouble is not None:
        yield fail(check, facts.trouble, facts.remedy)
    elif facts.damaged is not None:
        yield warn(check, facts.damaged, "nothing: the next change of an endpoint, or start of the server, writes both")
    elif not facts.open_files:
        yield ok(check, f"{facts.number} in the registry")
    if facts.open_files:
        paths = " ".join(facts.open_files)
        yield warn(check, f"other users can open {paths}", f"`dynamo doctor --fix`, or: chmod 600 {paths}")
