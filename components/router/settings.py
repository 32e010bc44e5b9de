"""Settings of the router."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dynamo_local.core.routing.policies import DEFAULT


@dataclass(frozen=True)
class RouterSettings:
    """Keys of the router."""

    policy: Literal["kv", "freeness", "least-loaded", "round-robin", "random"] = field(
        default=DEFAULT,
        metadata={
            "help": "How a worker is chosen for a request. kv: where most of its prefix is cached, unless another has "
            "so much less to do that it answers earlier. freeness: the most free KV cache. least-loaded: the fewest "
            "tokens of unfinished requests. round-robin, random: whatever the load."
        },
    )
