"""Messages between frontends and prefill workers: jobs, claims, grants."""

from __future__ import annotations

import msgspec

from dynamo_local.core.codec import VERSION
from dynamo_local.core.messages.work import Submit


class PrefillJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request of `frontend` that wants its prompt prefilled. Who takes the job claims the request there.

    `job` is new for every publication. After `deadline` (CLOCK_MONOTONIC, s) nobody waits for it any more.
    """

    job: str
    request_id: str
    frontend: str
    tokens: int
    deadline: float
    v: int = VERSION


class PrefillClaim(msgspec.Struct, frozen=True):
    """`worker` (its lease) has taken the job from the queue and would work on it. Each delivery claims anew."""

    job: str
    request_id: str
    worker: str
    delivery: int
    """1 for the first delivery of the job."""
    v: int = VERSION


class PrefillGrant(msgspec.Struct, frozen=True, omit_defaults=True):
    """The request under a new epoch, to be prefilled; or None: it needs no prefill any more, drop the job."""

    work: Submit | None = None
    v: int = VERSION
