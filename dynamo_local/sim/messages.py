"""How long messages take in a simulated fleet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Messages:
    """Times in seconds: `to_worker_s` from the client's request until the worker has it, `from_worker_s` from what a
    worker does until client, frontend and router know it. A migration takes both twice more: once its destination has
    read, and once it is cut."""

    to_worker_s: float = 0.0
    from_worker_s: float = 0.0

    @property
    def round_trip_s(self) -> float:
        return self.to_worker_s + self.from_worker_s


AT_ONCE = Messages()
