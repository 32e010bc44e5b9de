"""Messages between frontends and prefill workers: jobs, claims, grants."""

from __future__ import annotations

import msgspec

from dynamo_local.core.codec import Message
from dynamo_local.core.messages.work import Submit


class PrefillJob(Message, frozen=True, omit_defaults=True):
    """A request of `frontend` whose prompt is to be prefilled. The worker that takes the job claims the request there.

    `job` is new for every publication. The job is void once it is older than `valid_s` seconds, which its frontend
    knows, and is asked. `priority` is that of the request.
    """

    job: str
    request_id: str
    frontend: str
    tokens: int
    valid_s: float
    priority: int = 0


class PrefillClaim(Message, frozen=True):
    """Question for the request of a job that `worker` (a lease) has taken. Sent for each delivery of the job."""

    job: str
    request_id: str
    worker: str
    delivery: int
    """1 for the first delivery of the job."""


class PrefillGrant(Message, frozen=True, omit_defaults=True):
    """The request to be prefilled, under a new epoch; None if it needs no prefill any more, and the job is void."""

    work: Submit | None = None


class QueueLength(msgspec.Struct, frozen=True):
    """Length of a prefill queue. `waiting`: jobs never delivered; `in_hand`: jobs delivered and not done, which a
    worker has or which wait to be delivered again."""

    waiting: int
    in_hand: int
