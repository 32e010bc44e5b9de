"""What a node server is told when it is started: JSON on its standard input."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

import msgspec

from dynamo_local.bus.address import BusAddress
from dynamo_local.core.errors import ConfigError, DecodeError
from dynamo_local.core.names import check_namespace, check_node
from dynamo_local.sdk.config.resolved import ResolvedGraph

MOST_BYTES = 8 * 1024 * 1024

_PACKAGES = ("dynamo-local", "vllm")


class NodeOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`server`: id of the head's server, whose beats are awaited. `graph`: the resolved graph, which may hold secrets.
    `versions`: of Python and of the packages at the head that must be the same here, by name; those that it lacks are
    left out. `slots`: number of CPU slots of the node, where the cluster counts cores; None: as on any machine."""

    namespace: str
    node: str
    server: str
    bus: BusAddress
    graph: ResolvedGraph
    versions: dict[str, str]
    slots: int | None
    ready_deadline_s: float
    drain_deadline_s: float

    def encode(self) -> bytes:
        """As JSON. It holds the token of the bus."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> NodeOrder:
        """Inverse of `encode`. Raises DecodeError for anything else, ConfigError for names that make no sense."""
        try:
            order = msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise DecodeError(
                f"not an order for a node server: {error}", "use the dynamo-local version of the head"
            ) from error
        check_namespace(order.namespace)
        check_node(order.node)
        return order

    def check_versions(self) -> None:
        """Raise ConfigError if this node has another version of a package than the head."""
        installed = installed_versions()
        for package, expected in self.versions.items():
            found = installed.get(package)
            if found != expected:
                # Whoever starts a node server says on which node that was.
                here = f"{package} is not installed" if found is None else f"{package} {found} is installed"
                raise ConfigError(f"{here}, and the head has {expected}", "install the same on all nodes")


def installed_versions() -> dict[str, str]:
    """Versions of Python and the packages that must be the same on all nodes."""
    found = {"Python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
