"""An endpoint's place among those that share devices: what it lacks and since when, and since when it has its turn."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_local.core.endpoints.awake.idling import Idling
from dynamo_local.core.endpoints.rollout import Frontends, Ordered, Seen


@dataclass
class Turn:
    """Times are CLOCK_MONOTONIC, in s.

    `yields`: why the endpoint gives its devices to another one, and new requests are held; empty if it does not.
    `lacking`: what the workers take of devices that it lacks to serve requests; `waits_since`: since when somebody
    waits for them. `since`: since when a worker of it has been ready.
    """

    yields: str = ""
    lacking: tuple[float, ...] = ()
    waits_since: float | None = None
    since: float | None = None

    def note(self, lacking: tuple[float, ...], current: Seen, idling: Idling, now: float) -> None:
        """Follow a look at the endpoint. `lacking`: of the workers that it is to have at least."""
        is_awake, self.lacking = idling.rest == "awake", lacking
        if not lacking or not is_awake:
            self.waits_since = None
        elif self.waits_since is None:
            self.waits_since = now if idling.waking_since is None else idling.waking_since
        if not current.workers.ready or not is_awake:
            self.since = None
        elif self.since is None:
            self.since = now


def may_start(ordered: Ordered, current: Seen, *, kept: bool) -> bool:
    """Whether devices would be of use to the endpoint. `kept`: it is to be awake without a request."""
    is_wanted = (kept or ordered.rest == "awake") and not ordered.deleting and not ordered.wake_failed
    return is_wanted and current.launched and not current.has_failed and current.under_way != "ending"


def running(frontends: list[Frontends]) -> int | None:
    """Requests under way at these frontends, without those that are held; None if one of them does not say."""
    if any(None in (one.in_flight, one.held) for one in frontends):
        return None
    return sum(max(0, (one.in_flight or 0) - (one.held or 0)) for one in frontends)
