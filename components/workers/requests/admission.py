"""Submits requests to the engine: grown from a warm request, with blocks pulled from another worker, or plain."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from components.workers.kv_puller import KvPuller
from dynamo_local.core.errors import AdapterError, BadRequestError, EngineError, RequestError
from dynamo_local.core.messages.tokens import Fault
from dynamo_local.core.messages.work import RequestEpoch, Submit
from dynamo_local.core.ports import Engine, PulledPrefix
from dynamo_local.tasks import TaskGuard

_log = logging.getLogger(__name__)


class Reject(Protocol):
    """Called for a request that the engine does not take. `refused`: another worker may take it; `fault`: see
    `TokenDelta`."""

    async def __call__(
        self, request: RequestEpoch, frontend: str, why: str, *, refused: bool = False, fault: Fault | None = None
    ) -> None: ...


class Admission:
    """Submits requests to one engine. `wanted` says whether a request has not been cancelled meanwhile.
    `note_adapter(key, why)` is told that an adapter cannot be loaded, or was used (None)."""

    def __init__(
        self,
        tasks: TaskGuard,
        engine: Engine,
        puller: KvPuller,
        wanted: Callable[[RequestEpoch], bool],
        reject: Reject,
        note_adapter: Callable[[str, str | None], None],
    ) -> None:
        self._tasks = tasks
        self._engine = engine
        self._kv_puller = puller
        self._wanted = wanted
        self._reject = reject
        self._note_adapter = note_adapter
        self._submitting = 0
        """Requests that are being put to the engine, some of which may have been cancelled meanwhile."""

    @property
    def is_submitting(self) -> bool:
        return self._submitting > 0

    async def take(self, work: Submit, warm: RequestEpoch | None) -> None:
        """Submit a request; `warm` is a warm request that it can grow from (migration_target.py)."""
        request = RequestEpoch(work.request_id, work.epoch)
        # Not awaited: other requests are not to wait while the engine or the source is asked.
        if warm is not None:
            self._tasks.spawn(f"grow {request}", self._grow_or_submit(request, work, warm))
        elif work.source is not None:
            self._tasks.spawn(f"pull {request}", self._pull_and_submit(request, work, work.source))
        elif work.adapter is not None:
            # The engine may have to load it first.
            self._tasks.spawn(f"submit {request}", self._submit_if_wanted(request, work))
        else:
            await self._submit(request, work, None)

    async def _grow_or_submit(self, request: RequestEpoch, work: Submit, warm: RequestEpoch) -> None:
        if not self._wanted(request):
            return
        grown = await self._grow(work, warm)
        if not self._wanted(request):
            await self._engine.cancel([request])
        elif not grown:
            await self._submit(request, work, None)

    async def _grow(self, work: Submit, warm: RequestEpoch) -> bool:
        self._submitting += 1
        try:
            return await self._engine.grow(work, warm)
        except Exception:  # noqa: BLE001
            # Warm requests save time; no request depends on them.
            _log.exception(
                "the KV transferred for request %s cannot be used; its tokens are computed again", work.request_id
            )
            return False
        finally:
            self._submitting -= 1

    async def _pull_and_submit(self, request: RequestEpoch, work: Submit, source: str) -> None:
        pulled = await self._kv_puller.pull(work, source)
        if not self._wanted(request):
            await self._kv_puller.done([request])
            return
        await self._submit(request, work, pulled)

    async def _submit_if_wanted(self, request: RequestEpoch, work: Submit) -> None:
        if self._wanted(request):
            await self._submit(request, work, None)

    async def _submit(self, request: RequestEpoch, work: Submit, pulled: PulledPrefix | None) -> None:
        self._submitting += 1
        try:
            await self._put(request, work, pulled)
        finally:
            self._submitting -= 1

    async def _put(self, request: RequestEpoch, work: Submit, pulled: PulledPrefix | None) -> None:
        try:
            await self._engine.submit(work, pulled)
        except AdapterError as error:
            self._note_adapter(work.adapter or "", error.reason)
            await self._reject(request, work.frontend, str(error), fault="request")
        except BadRequestError as error:
            await self._reject(request, work.frontend, str(error), fault="request")
        except RequestError as error:
            await self._reject(request, work.frontend, str(error))
        except EngineError as error:
            # The engine is dead and this process about to end; another worker may take the request.
            await self._reject(request, work.frontend, str(error), refused=True)
        except Exception:  # noqa: BLE001
            # The boundary of a request: it fails alone, and its client is told.
            _log.exception("request %s could not be submitted to the engine", request)
            await self._reject(request, work.frontend, "the engine could not take the request")
        else:
            if work.adapter is not None:
                self._note_adapter(work.adapter, None)
            if not self._wanted(request):
                # It was cancelled before the engine knew of it, so that the engine ignored that.
                await self._engine.cancel([request])
