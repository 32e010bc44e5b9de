"""Messages from operators, the planner and the server to the processes: roles, parking, requests, the token of NATS."""

from __future__ import annotations

import msgspec

from dynamo_local.core.codec import Message

# Roles, parking, and the requests of frontends.


class RoleQuestion(Message, frozen=True):
    """Order to a worker to change its role."""

    role: str


class RoleAnswer(Message, frozen=True, omit_defaults=True):
    """The role that the worker has now; `refused` says why not the one in the question."""

    role: str
    refused: str | None = None


class ParkQuestion(Message, frozen=True):
    """Order to a worker to park (`parked`), or to take requests again."""

    parked: bool


class ParkAnswer(Message, frozen=True, omit_defaults=True):
    """Whether the worker is parked now; `refused` says why the order was not carried out."""

    parked: bool
    refused: str | None = None


class RequestsQuestion(Message, frozen=True, tag="requests"):
    """Question for the requests of a frontend; the oldest come first, at most `limit`."""

    limit: int


class RequestLine(msgspec.Struct, frozen=True, kw_only=True):
    """A request under way. Frontends name requests and workers by id and lease, and leave out what they do not know; to
    operators the server names them by the id that the client knows, and by watcher."""

    request: str
    worker: str | None
    """None while the request waits for a worker or a prefill worker."""
    endpoint: str = ""
    """The endpoint that the request is for; "main" for the graph's own model."""
    revision: str = ""
    """The revision of that endpoint, such as "chat@2"."""
    epoch: int
    prompt_tokens: int | None
    """None: the request is held, and its prompt's length is not known yet."""
    tokens: int
    """Output tokens accepted so far."""
    age_s: float
    moving_to: str | None = None
    """The destination, while the request is being migrated."""
    stays: str | None = None
    """Why the request cannot be migrated; None if it can."""
    frontend: str = ""
    epoch_age_s: float | None = None
    """Time since the current epoch began; None if the request had none yet."""
    epoch_start: int = 0
    """Number of output tokens when the current epoch began."""
    migrations: int = 0
    """Number of times that the request was cut over to another worker."""
    prefill: str | None = None
    """State of the remote prefill, in words; None if the decode worker prefills."""
    fidelity: str = "exact"
    """What becomes of the output elsewhere: a `Fidelity` (core/request/recovery.py) in lower case."""
    fidelity_because_of: str | None = None
    """Sampling parameter that decides the fidelity."""
    held: str | None = None
    """Why the request is held until a worker is ready; then it has no id yet. None: it is not held."""


class HeldRow(msgspec.Struct, frozen=True):
    """A request that is held because no worker of its model is ready: no worker and no id are known yet."""

    sequences: int
    age_s: float
    why: str


class RequestsAnswer(Message, frozen=True, omit_defaults=True):
    """A frontend's requests; `left_out` is the number of those beyond the limit."""

    requests: tuple[RequestLine, ...]
    left_out: int
    held: tuple[HeldRow, ...] = ()


class MigrationOrder(Message, frozen=True, omit_defaults=True, tag="migrate"):
    """Order to migrate these requests, or all on `source` (a lease), to `destination` (a lease), or to the worker with
    the most room. Requests that the frontend does not have are ignored. `cold`: without their KV, which is computed
    anew.
    """

    request_ids: tuple[str, ...] = ()
    source: str | None = None
    destination: str | None = None
    cold: bool = False


class MigrationResult(msgspec.Struct, frozen=True):
    """The result for one request. `outcome` is a `MigrationOutcome` (core/migration/protocol.py). `warm_s`: from the
    beginning to the cut; `gap_s`: from the last token before the cut to the first after it; `gap_steps`: the gap in
    decode steps of the request. Frontends name requests and workers by id and lease; to operators the server names them
    by the id that the client knows, and by watcher."""

    request: str
    outcome: str
    why: str
    worker: str | None = None
    """The destination; None if there was none."""
    warm_s: float | None = None
    gap_s: float | None = None
    gap_steps: float | None = None


class MigrationReport(Message, frozen=True):
    """The results of an order, one for each request."""

    results: tuple[MigrationResult, ...]


AdminRequest = RequestsQuestion | MigrationOrder
"""Requests of an operator on a frontend's subject."""


# The token of NATS: what the server and its processes say of a new one. No token is ever in a message: processes read
# it from the file of the bus's address.


class AddressChanged(Message, frozen=True, tag="changed"):
    """Tells all processes to read the address of the bus anew."""


class AddressTaken(Message, frozen=True, omit_defaults=True):
    """A process is connected as `user`. `lease`: its own; empty for a command."""

    lease: str = ""
    user: str | None = None
