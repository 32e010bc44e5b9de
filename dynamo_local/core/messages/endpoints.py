"""Endpoints as they are shown, and the board that tells frontends what to serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from dynamo_local.core.endpoints.spec import EndpointSpec

EndpointState = Literal[
    "waiting", "fetching", "starting", "waking", "ready", "parked", "asleep", "updating", "failed", "deleting"
]
"""`waiting`: for devices, or for another endpoint. `fetching`: its model is checked and downloaded. `starting`: no
worker is ready yet. `waking`: it was parked or asleep, and no worker is ready yet. `parked`: its workers are parked.
`asleep`: it has no workers until it is asked for. `updating`: it answers, while another revision starts or the last one
ends. `failed`: it does not answer, and will not without another order, or not for a while; the reason says why."""


class EndpointStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """State of an endpoint. `reason` is a line for its owner: what it waits for, or what went wrong last.

    `revision`: number of the revision that answers, or is to answer first. `wanted`: numbers that the workers are
    brought to; `ready`: workers that take requests; `parked`: workers that are parked.
    """

    state: EndpointState
    reason: str = ""
    revision: int = 1
    wanted: int = 0
    ready: int = 0
    starting: int = 0
    wanted_prefill: int = 0
    ready_prefill: int = 0
    parked: int = 0


class AdapterOrdered(msgspec.Struct, frozen=True):
    """What the order of an adapter has come to. `loaded`: the workers of its base load it as they are. `rolled`: they
    had no room for it, so others start, which have. `reason`: a line that says so."""

    result: Literal["loaded", "rolled"]
    reason: str


class EndpointHistory(msgspec.Struct, frozen=True, omit_defaults=True):
    """How often an endpoint was parked, fell asleep and was woken since the server started, by cause, and gave devices
    to another endpoint (`swaps`). `last`: the last of this in words, at `last_at` (seconds since 1970)."""

    parks: dict[str, int] = {}
    sleeps: dict[str, int] = {}
    wakes: dict[str, int] = {}
    swaps: int = 0
    last: str = ""
    last_at: float = 0.0


class EndpointView(msgspec.Struct, frozen=True, omit_defaults=True):
    """An endpoint as commands and REST show it. Times are of the wall clock, in seconds since 1970.

    `served_names`: names by which requests ask for its model, the first of which the endpoint's own name is. `adapter`:
    in the answer to the order of an adapter alone.
    """

    spec: EndpointSpec
    status: EndpointStatus
    created_at: float
    updated_at: float
    served_names: tuple[str, ...] = ()
    adapter: AdapterOrdered | None = None
    history: EndpointHistory = EndpointHistory()


def shown(view: EndpointView) -> dict[str, Any]:
    """Return an endpoint as answers have it: the fields of its spec among the others, default values included."""
    ordered = {} if view.adapter is None else {"adapter": _all_fields(view.adapter)}
    return {
        "object": "endpoint",
        **_all_fields(view.spec),
        "status": _all_fields(view.status),
        **ordered,
        "served_names": list(view.served_names),
        "history": _all_fields(view.history),
        "created_at": view.created_at,
        "updated_at": view.updated_at,
    }


def progress_of(view: EndpointView) -> str:
    """The state of an endpoint in a line. Pure."""
    status = view.status
    counts = f"{status.ready} of {status.wanted} workers ready" if status.wanted else ""
    if status.wanted_prefill:
        counts += f", {status.ready_prefill} of {status.wanted_prefill} prefill workers ready"
    return ": ".join(part for part in (f"{view.spec.name} is {status.state}", status.reason or counts) if part)


def view_of(content: Mapping[str, Any]) -> EndpointView:
    """Inverse of `shown`."""
    spec = {name: content[name] for name in EndpointSpec.__struct_fields__ if name in content}
    return msgspec.convert({**content, "spec": spec}, EndpointView)


def _all_fields(of: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(of, name) for name in of.__struct_fields__}


class ServedAdapter(msgspec.Struct, frozen=True):
    """A LoRA adapter that a revision serves beside its model: its name in requests, and its folder.

    `version`: another one for each order of another adapter under that name. Empty: there are no versions.
    """

    name: str
    path: str
    version: str = ""

    @property
    def key(self) -> str:
        """Its name between frontends and workers: none of another version is taken for it, nor its KV."""
        return f"{self.name}@{self.version}" if self.version else self.name


def adapter_name(key: str) -> str:
    """The name of an adapter by its `ServedAdapter.key`."""
    return key.partition("@")[0]


class BoardRevision(msgspec.Struct, frozen=True, omit_defaults=True):
    """A revision that frontends serve.

    `takes_requests`: new requests go to it. Otherwise the frontend prepares for it (`starting`), or lets its requests
    finish and then gives it up. Its graph is in the run directory (`StatePaths.graph_of`). `yields`: why it gives its
    devices to another endpoint; until it has new ones, frontends hold new requests, and its own go on.
    """

    revision: str
    takes_requests: bool
    served_names: tuple[str, ...]
    adapters: tuple[ServedAdapter, ...] = ()
    yields: str = ""


class Board(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the server has ordered of its frontends and tells its planner. `number` grows with every change."""

    number: int = 0
    revisions: tuple[BoardRevision, ...] = ()
    endpoints: tuple[EndpointView, ...] = ()
