"""What a node server is told by its head: its order when it is started, JSON on its standard input; then beats. It ends
by itself when these are silent, when the head was replaced, or when the process that it watches is gone."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

import msgspec

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import BusError, ConfigError, DecodeError
from dynamo_local.core.names import check_namespace, check_node
from dynamo_local.core.subjects import Subjects
from dynamo_local.process.endings import ended
from dynamo_local.sdk.config.resolved import ResolvedGraph
from dynamo_local.supervisor.places.far import HeadBeat

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


BEAT_S = 2.0
"""Interval of the head's beats."""

SILENT_S = 30.0
"""A head that was not heard for so long is gone: longer than NATS takes to be restarted and all to connect again. The
workers, of which nobody hears without NATS, would hold their devices for nobody."""

REPLACED_S = 3 * BEAT_S
"""A head that was not heard for so long while another one beats was replaced: what one that was cut off has sent is
heard late."""

_LOOK_S = 1.0


@dataclass
class HeadSilence:
    """Listens for the beats of the head's server of that id."""

    server: str
    silent_s: float = SILENT_S
    clock: Callable[[], float] = time.monotonic
    replaced: bool = field(default=False, init=False)
    _heard_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._heard_at = self.clock()

    async def listen(self, bus: Bus, subjects: Subjects) -> None:
        """Hear the beats on the bus."""
        await bus.listen(subjects.head, HeadBeat, self.on_beat)

    async def on_beat(self, beat: HeadBeat) -> None:
        """Note a beat: of the server, or of one that has taken its place."""
        if beat.server == self.server:
            self._heard_at = self.clock()
        elif self.clock() - self._heard_at >= REPLACED_S:
            self.replaced = True

    @property
    def reason(self) -> str | None:
        """Why this node server is to end; None while it is not."""
        if self.replaced:
            return "another server has taken the place of the one that has started this node server"
        silent_s = self.clock() - self._heard_at
        return f"nothing was heard of the server for {silent_s:.0f} s" if silent_s >= self.silent_s else None

    async def over(self) -> str:
        """Wait until this node server is to end. Returns the reason."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if (reason := self.reason) is not None:
                return reason


async def beat(bus: Bus, subjects: Subjects, server: str) -> None:
    """Tell node servers, until cancelled, that the head's server lives."""
    while True:
        # The next one is as good.
        with suppress(BusError):
            await bus.send(subjects.head, HeadBeat(server))
        await asyncio.sleep(BEAT_S)


async def beat_apart(address: BusAddress, subjects: Subjects, server: str) -> None:
    """The same by a connection of its own, which outlives those that close before a drain. Raises BusError."""
    bus = await Bus.connect(address, name="beats")
    try:
        await beat(bus, subjects, server)
    finally:
        await bus.close()


async def gone(pid: int) -> str:
    """Wait until that process of this machine has ended. Returns that in words."""
    await ended(pid)
    return f"process {pid}, with which this node server is to end, is gone"
