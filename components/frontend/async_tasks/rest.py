"""Asynchronous tasks under /v1/async-tasks, as LLM Engine's clients know them: each key has its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from components.frontend.async_tasks.calling import Calling
from components.frontend.async_tasks.keeper import LOOK_EVERY_S, TaskKeeper
from components.frontend.http.callers import Caller
from components.frontend.http.exchange import unavailable
from components.frontend.http.incoming import BodyRefusedError, read_body
from components.frontend.http.models import ModelTable
from components.frontend.http.outgoing import answer_json, query_of, refusal_of
from components.frontend.request_context import caller_of
from dynamo_local.core.async_tasks.callbacks import MODEL_ENDPOINT, TASK_PRIORITY, TaskOrder, order_of
from dynamo_local.core.async_tasks.records import TaskHead, undefined
from dynamo_local.core.errors import ConfigError, DecodeError, StateError, UsageError
from dynamo_local.core.http.asgi import HeaderMap, Receive, Scope, Send, headers_of
from dynamo_local.core.http.bounds.admission import FIELD, HEADER_KEY, AdmissionLimits, Refusal, examine, priority_asked
from dynamo_local.core.http.paths import TASKS
from dynamo_local.tasks import finish_in_thread
from state.async_tasks.store import TaskStore, new_task_id

_CANCEL_S = 10.0
"""Longest wait for the end of a task that was cancelled, which another frontend may have."""


class TasksRest:
    """Answers requests about tasks."""

    def __init__(
        self,
        store: TaskStore,
        models: ModelTable,
        limits: AdmissionLimits,
        calling: Calling,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._models = models
        self._limits = limits
        self._calling = calling
        self._wall_clock = wall_clock
        self.keeper: TaskKeeper | None = None
        """Takes what is stored; None: the frontend is starting."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> Refusal | None:
        """Answer a request, or return why not. Raises ClientGoneError."""
        keeper = self.keeper
        if keeper is None or keeper.why_closed:
            return unavailable("the frontend is starting" if keeper is None else keeper.why_closed)
        try:
            answered = await self._answer(scope, receive, keeper)
        except BodyRefusedError as error:
            return error.refusal
        except (UsageError, StateError) as error:
            return refusal_of(error)
        if isinstance(answered, Refusal):
            return answered
        await answer_json(send, answered)
        return None

    async def _answer(self, scope: Scope, receive: Receive, keeper: TaskKeeper) -> dict[str, Any] | Refusal:
        task = scope["path"].removeprefix(TASKS).removeprefix("/")
        caller = caller_of(scope)
        if not task:
            return await self._create(scope, receive, keeper)
        if scope["method"] == "DELETE":
            return await self._delete(caller.owner, task, keeper)
        try:
            # Results may be large: they are read as JSON in the thread as well.
            return await finish_in_thread(lambda: self._store.find(caller.owner, task).shown_to_owner())
        except DecodeError:
            return undefined(task)

    async def _create(self, scope: Scope, receive: Receive, keeper: TaskKeeper) -> dict[str, Any] | Refusal:
        caller, headers = caller_of(scope), headers_of(scope)
        endpoint = query_of(scope, frozenset({MODEL_ENDPOINT})).get(MODEL_ENDPOINT)
        order = order_of(await read_body(headers, receive, self._limits), endpoint)
        path = self._path(order, caller)
        priority = _priority(order, headers, caller)
        if isinstance(path, Refusal):
            return path
        if isinstance(priority, Refusal):
            return priority
        if order.callback_url:
            await self._calling.check(caller.owner, order.callback_url)
        now = self._wall_clock()
        head = TaskHead(
            task=new_task_id(now),
            model=str(order.fields["model"]),
            path=path,
            priority=priority,
            created_at=int(now),
            callback_url=order.callback_url,
            callback_auth=order.callback_auth,
        )
        await finish_in_thread(lambda: self._store.create(caller.owner, head, msgspec.json.encode(order.fields)))
        keeper.note_new(caller.owner, head)
        return {"task_id": head.task}

    def _path(self, order: TaskOrder, caller: Caller) -> str | Refusal:
        """Return the path at which a model can be asked what is ordered."""
        if not order.fields.get("model"):
            raise ConfigError(f"{MODEL_ENDPOINT}: name the endpoint in the query, or the model in args.model")
        refusal: Refusal | None = None
        for path in order.paths:
            entry = self._models.asked(order.fields, path, caller.allows)
            if not isinstance(entry, Refusal):
                demand = examine(order.fields, entry.limits)
                return demand if isinstance(demand, Refusal) else path
            refusal = refusal or entry
        assert refusal is not None, "an order is for at least one path"
        return refusal

    async def _delete(self, owner: str, task: str, keeper: TaskKeeper) -> dict[str, Any] | Refusal:
        """End a task whoever has it, and forget it."""
        await finish_in_thread(lambda: self._store.cancel(owner, task))
        keeper.look_soon()
        deadline = time.monotonic() + _CANCEL_S
        while not await finish_in_thread(lambda: self._store.has_ended(owner, task)):
            if time.monotonic() >= deadline:
                return unavailable(f"{task} has not ended yet: it is being cancelled")
            await asyncio.sleep(LOOK_EVERY_S / 10)
        await finish_in_thread(lambda: self._store.remove(owner, task))
        return {"task_id": task, "deleted": True}


def _priority(order: TaskOrder, headers: HeaderMap, caller: Caller) -> int | Refusal:
    given = headers.get(HEADER_KEY, b"")
    if not given and order.fields.get(FIELD) is None:
        return max(TASK_PRIORITY, caller.priorities.default)
    return priority_asked(order.fields, given, caller.priorities)
