"""The routing policies by their names. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from dynamo_local.core.routing.cache_policies import SoonestFirstToken
from dynamo_local.core.routing.choice import RoutingPolicy
from dynamo_local.core.routing.load_policies import DrawnByLot, Freest, LeastOutstandingTokens, RoundRobin

POLICIES: Mapping[str, Callable[[], RoutingPolicy]] = {
    "kv": SoonestFirstToken,
    "freeness": Freest,
    "least-loaded": LeastOutstandingTokens,
    "round-robin": RoundRobin,
    "random": DrawnByLot,
}

DEFAULT: Final = "kv"
