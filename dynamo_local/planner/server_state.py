"""Reads a running server's statefile for the planner. What cannot be read is unknown, and logged once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from dynamo_local.core.errors import NotRunningError, StateError
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.names import endpoint_of, parse_watcher
from dynamo_local.core.planning.observation import Claim
from dynamo_local.core.shares import summed
from dynamo_local.log_once import LogOnce
from state.statefile.model import State
from state.statefile.store import StateStore, server_pid

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerState:
    """The claims of all workers and the number of devices for the server, at one moment."""

    claims: tuple[Claim, ...]
    inventory: int

    def claims_of(self, endpoint: str) -> tuple[Claim, ...]:
        """The claims of an endpoint's workers, of all its revisions; of the graph's own if `endpoint` is empty."""
        return tuple(each for each in self.claims if endpoint_of(parse_watcher(each.watcher).revision) == endpoint)

    def devices_of(self, endpoint: str) -> float:
        """Devices that those workers hold together."""
        return summed(claim.devices for claim in self.claims_of(endpoint))

    @property
    def devices(self) -> float:
        """Devices that all workers hold together."""
        return summed(claim.devices for claim in self.claims)

    @property
    def devices_of_endpoints(self) -> float:
        """Devices that the workers of all endpoints hold together."""
        return summed([self.devices, -self.devices_of("")])


class StateReader:
    """`inventory` returns the number of devices for the server of a state; a call may block for milliseconds."""

    def __init__(self, store: StateStore, inventory: Callable[[State], int]) -> None:
        self._store = store
        self._inventory = inventory
        self._failure = LogOnce(_log)

    async def read(self) -> ServerState | None:
        """Return None if the statefile cannot be read. Raises NotRunningError when the server has ended."""

        def read() -> ServerState:
            state = self._store.read()
            return ServerState(claims_of(state), self._inventory(state))

        try:
            found = await asyncio.to_thread(read)
        except (NotRunningError, StateError) as error:
            if isinstance(error, NotRunningError) and await asyncio.to_thread(server_pid, self._store.paths) is None:
                raise
            self._failure.warn(f"the statefile cannot be read: {error}")
            return None
        self._failure.clear()
        return found


def claims_of(state: State) -> tuple[Claim, ...]:
    """Return the claims of workers that run, start, restart or end."""
    return tuple(
        Claim(name, component.role, component.device_count, retiring=component.phase == "retiring")
        for name, component in state.components.items()
        if component.holds and component.role in ENGINE_ROLES
    )
