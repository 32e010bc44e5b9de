"""Submits requests to the engine: grown from a warm request, with blocks pulled from another worker, or plain."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from components.workers.kv_puller import KvPuller
from dynamo_local.core.errors import AdapterError, BadRequestError, EngineError, RequestError
from dynamo_local.core.messages.presence import ClassUsage, Load
from dynamo_local.core.messages.work import Fault, RequestEpoch, Submit, TokenDelta
from dynamo_local.core.ports import Engine, PulledPrefix
from dynamo_local.core.priority.classes import PriorityClass, class_of
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


# Tells from an engine's steps which requests run and which wait: the first of these, and the others by class.
#
# An engine reports how many requests wait, not which. But every running request brings a token with each step, unless
# its prompt is being computed; and engines admit in order. So of the requests without a token in the last step, those
# that come last in that order are waiting, as many as the engine says. Where keys compete, or a lower class has its
# turn, engines admit in another order (core/priority/fair_queue.py), and the first one is an estimate.


@dataclass(eq=False)
class _Context:
    order: tuple[int, float]
    """The order in which engines admit: by priority, the lowest first, then by arrival."""
    tokens: int
    priority_class: PriorityClass
    brought_at: int = 0
    """Number of the last step that brought a token."""
    preempted_at: int = 0
    """The same number when its KV was last given to others; 0: never."""

    @property
    def preempted(self) -> bool:
        """Whether it was preempted, and has brought no token since."""
        return 0 < self.preempted_at == self.brought_at


class QueueHead:
    """The contexts of one engine's unfinished requests, with their lengths in tokens."""

    def __init__(self) -> None:
        self._contexts: dict[RequestEpoch, _Context] = {}
        self._requests: Counter[PriorityClass] = Counter()
        self._tokens: Counter[PriorityClass] = Counter()
        """Of all contexts, by class."""
        self._step = 0
        self._first: _Context | None = None
        self._first_since = 0.0
        self._recomputed = 0

    def taken(self, work: Submit) -> None:
        """Note a submission."""
        request = RequestEpoch(work.request_id, work.epoch)
        self._drop(request)
        context = _Context((work.priority, work.arrival_time), len(work.token_ids), class_of(work.priority))
        self._contexts[request] = context
        self._count(context, 1)

    def stepped(self, deltas: Iterable[TokenDelta]) -> None:
        """Note the output of a step."""
        self._step += 1
        for delta in deltas:
            request = RequestEpoch(delta.request_id, delta.epoch)
            if delta.finish is not None:
                self._drop(request)
            elif (context := self._contexts.get(request)) is not None:
                context.tokens += len(delta.token_ids)
                self._tokens[context.priority_class] += len(delta.token_ids)
                context.brought_at = self._step

    def forgotten(self, requests: Iterable[RequestEpoch]) -> None:
        """Drop requests that the engine does not work on any more."""
        for request in requests:
            self._drop(request)

    def completed(self, load: Load, now: float) -> Load:
        """Return the engine's load after its last step, with what is known here."""
        queue = self._waiting(load.waiting)
        preempted_tokens = None if load.waiting is None else self._note_preempted(queue)
        load = msgspec.structs.replace(load, preempted_tokens=preempted_tokens, recomputed_tokens=self._recomputed)
        if not queue:
            self._first = None
            head_tokens = 0 if load.waiting == 0 else None
            return msgspec.structs.replace(load, head_tokens=head_tokens, by_class=self._by_class(queue))
        if self._first is not queue[0]:
            self._first, self._first_since = queue[0], now
        return msgspec.structs.replace(
            load,
            head_tokens=self._first.tokens,
            head_priority=self._first.order[0],
            head_since=self._first_since,
            by_class=self._by_class(queue),
        )

    def _waiting(self, waiting: int | None) -> list[_Context]:
        """Return the contexts that wait, in order."""
        if not waiting:
            return []
        silent = [context for context in self._contexts.values() if context.brought_at < self._step]
        silent.sort(key=lambda context: context.order)
        return silent[max(len(silent) - waiting, 0) :]

    def _note_preempted(self, queue: Iterable[_Context]) -> int:
        """Note which of the contexts that wait have run before. Return their tokens."""
        preempted = [context for context in queue if context.brought_at > 0]
        for context in preempted:
            if not context.preempted:
                context.preempted_at = context.brought_at
                self._recomputed += context.tokens
        return sum(context.tokens for context in preempted)

    def _by_class(self, queue: Iterable[_Context]) -> tuple[ClassUsage, ...]:
        requests, tokens = self._requests.copy(), self._tokens.copy()
        for context in queue:
            requests[context.priority_class] -= 1
            tokens[context.priority_class] -= context.tokens
        return tuple(ClassUsage(one, requests[one], tokens[one]) for one in PriorityClass if requests[one] > 0)

    def _drop(self, request: RequestEpoch) -> None:
        if (context := self._contexts.pop(request, None)) is not None:
            self._count(context, -1)

    def _count(self, context: _Context, times: int) -> None:
        self._requests[context.priority_class] += times
        self._tokens[context.priority_class] += times * context.tokens
