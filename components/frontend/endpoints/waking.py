"""The endpoints of a frontend as what it has woken: what the board and its workers say of them, and the order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dynamo_local.control.client import ControlClient
from dynamo_local.control.operations import WAKE_ENDPOINT
from dynamo_local.core.errors import DynamoError, NotRunningError, UnansweredError
from dynamo_local.core.http.waiting.waking import Idle, idle_as, is_waking, may_be_tried
from dynamo_local.core.messages.endpoints import EndpointView
from state.paths import StatePaths

ANSWER_S = 2.0
"""Time for the server to answer. It answers before the endpoint is awake."""
_AT_ONCE = 8


class WakingServer:
    """Asks the server of a namespace to wake endpoints, in threads of its own: those that wait for a server that is
    stopped hold up no other work of the frontend."""

    def __init__(self, paths: StatePaths) -> None:
        self._client = ControlClient(paths)
        self._threads = ThreadPoolExecutor(_AT_ONCE, "waking")

    async def wake(self, name: str) -> str:
        """Ask once. Returns why the server refuses; empty: it wakes the endpoint. Raises NotRunningError,
        UnansweredError."""

        def ask() -> None:
            self._client.do(WAKE_ENDPOINT, query={"asked": "true"}, timeout_s=ANSWER_S, name=name)

        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        except (NotRunningError, UnansweredError):
            raise
        except DynamoError as error:
            return str(error)
        return ""


@dataclass(frozen=True)
class WorkersHere:
    """What this frontend sees of an endpoint's workers. `parked`: one of them is. `ready`: one of them is, or the
    frontend cannot serve the endpoint anyway. `lacking`: a request that had gone on has no worker any more."""

    parked: bool = False
    ready: bool = False
    lacking: bool = False


class ServedEndpoint:
    """An endpoint of the board. Implements `components.frontend.http.waking.WakeableEndpoint`."""

    def __init__(
        self,
        name: str,
        server: WakingServer,
        view: Callable[[], EndpointView | None],
        workers: Callable[[], WorkersHere],
    ) -> None:
        """`view` and `workers` return what is known of the endpoint now."""
        self.name = name
        self._server = server
        self._view = view
        self._workers = workers

    def idle(self) -> Idle | None:
        """How the endpoint is idle; None: it is not, or could not be served if it were woken."""
        workers = self._workers()
        return None if workers.ready else idle_as(self._view(), parked=workers.parked)

    def lacks_workers(self) -> bool:
        """Whether a request that was not held, or is not any more, waits for a worker."""
        return self._workers().lacking

    def is_waking(self) -> bool:
        """Whether it comes up for those who ask for it."""
        return not self._workers().ready and is_waking(self._view())

    def may_be_tried(self) -> bool:
        """Whether it has failed to wake, and may be tried again."""
        return not self._workers().ready and may_be_tried(self._view())

    async def wake(self) -> str:
        """As `WakingServer.wake`."""
        return await self._server.wake(self.name)
