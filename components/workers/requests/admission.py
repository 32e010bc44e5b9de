"""Putting a request to the engine: grown from what was warmed for it, with blocks pulled, or as it is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from components.workers.kv_puller import KvPuller
from dynamo_local.core.errors import BadRequestError, EngineError, RequestError
from dynamo_local.core.messages.tokens import Fault
from dynamo_local.core.messages.work import RequestEpoch, Submit
from dynamo_local.core.ports import Engine, PulledPrefix
from dynamo_local.tasks import TaskGuard

_log = logging.getLogger(__name__)


class Reject(Protocol):
    """What becomes of a request that the engine does not take. `refused`: another worker may; `fault`: see
    `TokenDelta`."""

    async def __call__(
        self, request: RequestEpoch, frontend: str, why: str, *, refused: bool = False, fault: Fault | None = None
    ) -> None: ...


class Admission:
    """`wanted`: whether a request has not been cancelled meanwhile."""

    def __init__(
        self,
        tasks: TaskGuard,
        engine: Engine,
        puller: KvPuller,
        wanted: Callable[[RequestEpoch], bool],
        reject: Reject,
    ) -> None:
        self._tasks = tasks
        self._engine = engine
        self._puller = puller
        self._wanted = wanted
        self._reject = reject

    async def take(self, work: Submit, warm: RequestEpoch | None) -> None:
        """Put it to the engine; `warm` is a warm request that it can grow from."""
        request = RequestEpoch(work.request_id, work.epoch)
        # Not awaited: others are not to wait while the engine or the source is asked.
        if warm is not None:
            self._tasks.spawn(f"grow {request}", self._grow_or_put(request, work, warm))
        elif work.source is not None:
            self._tasks.spawn(f"pull {request}", self._pull_and_put(request, work, work.source))
        else:
            await self._put(request, work, None)

    async def _grow_or_put(self, request: RequestEpoch, work: Submit, warm: RequestEpoch) -> None:
        if not self._wanted(request):
            return
        grown = await self._grow(work, warm)
        if not self._wanted(request):
            await self._engine.cancel([request])
        elif not grown:
            await self._put(request, work, None)

    async def _grow(self, work: Submit, warm: RequestEpoch) -> bool:
        try:
            return await self._engine.grow(work, warm)
        except Exception:  # noqa: BLE001
            # What was warmed is a gain of time, which no request depends on.
            _log.exception("%s is computed, not grown from what was warmed", work.request_id)
            return False

    async def _pull_and_put(self, request: RequestEpoch, work: Submit, source: str) -> None:
        pulled = await self._puller.pull(work, source)
        if not self._wanted(request):
            await self._puller.done([request])
            return
        await self._put(request, work, pulled)

    async def _put(self, request: RequestEpoch, work: Submit, pulled: PulledPrefix | None) -> None:
        try:
            await self._engine.submit(work, pulled)
        except BadRequestError as error:
            await self._reject(request, work.frontend, str(error), fault="request")
        except RequestError as error:
            await self._reject(request, work.frontend, str(error))
        except EngineError as error:
            # This process is about to end for it; another one may take the request.
            await self._reject(request, work.frontend, str(error), refused=True)
        except Exception:  # noqa: BLE001
            # The boundary of a request: it fails alone, and its client is told.
            _log.exception("request %s could not be put to the engine", request)
            await self._reject(request, work.frontend, "the engine could not take the request")
        else:
            if not self._wanted(request):
                # Cancelled while the engine, which did not know it then, was taking it.
                await self._engine.cancel([request])
