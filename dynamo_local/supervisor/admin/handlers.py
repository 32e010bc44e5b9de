"""Answers questions and orders of the control API about what runs and what it does."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from dynamo_local.control.answers import QueueView, RequestsView, SettingRow
from dynamo_local.control.descriptions import Description, FleetLook, RoutesView
from dynamo_local.control.operations import (
    CHANGE_ROLE,
    DESCRIBE,
    LIST_REQUESTS,
    LIST_ROUTES,
    LIST_SETTINGS,
    LIST_WORKERS,
    LOOK,
    MIGRATE,
    PURGE_QUEUE,
    READ_QUEUE,
    SET_SETTING,
    Call,
    Handlers,
)
from dynamo_local.supervisor.admin.asked import AskedServer
from dynamo_local.supervisor.admin.describe import describe
from dynamo_local.supervisor.admin.queue import purge_queue, read_queue
from dynamo_local.supervisor.admin.requests import MigrationWish, list_requests, migrate
from dynamo_local.supervisor.admin.role import RoleWish, change_role
from dynamo_local.supervisor.admin.routes import list_routes
from dynamo_local.supervisor.admin.settings import list_settings, set_value
from dynamo_local.supervisor.admin.status import devices_of_others, list_watchers

_MOST, _MOST_ROUTES = 100, 20
"""What is told where no limit is given."""


@dataclass(frozen=True)
class AdminHandlers:
    """Answers from the start on: what is not known yet is said so. Roles are changed one at a time."""

    server: AskedServer
    _role_change: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    @property
    def handlers(self) -> Handlers:
        return {
            LIST_WORKERS: self._workers,
            CHANGE_ROLE: self._role,
            LOOK: self._look,
            DESCRIBE: self._describe,
            LIST_REQUESTS: self._requests,
            MIGRATE: self._migrate,
            READ_QUEUE: self._queue,
            PURGE_QUEUE: self._purge,
            LIST_ROUTES: self._routes,
            LIST_SETTINGS: self._settings,
            SET_SETTING: self._set,
        }

    async def _workers(self, call: Call) -> dict[str, Any]:
        others = {"held_by_others": await devices_of_others(self.server)} if call.flag("others") else {}
        return {"object": "list", "data": await list_watchers(self.server), **others}

    async def _role(self, call: Call) -> dict[str, str]:
        watcher, wish = call.names["watcher"], call.content(RoleWish)
        async with self._role_change:
            return {"watcher": watcher, "role": await change_role(self.server, watcher, wish)}

    async def _look(self, _: Call) -> FleetLook:
        return await self.server.look()

    async def _describe(self, call: Call) -> Description:
        return await describe(self.server, call.names["name"])

    async def _requests(self, call: Call) -> RequestsView:
        limit, query = call.number("limit", _MOST), call.query
        return await list_requests(self.server, limit, query.get("worker"), query.get("endpoint"))

    async def _migrate(self, call: Call) -> dict[str, Any]:
        return {"object": "list", "data": await migrate(self.server, call.content(MigrationWish))}

    async def _queue(self, call: Call) -> QueueView:
        return await read_queue(self.server, call.number("limit", _MOST), call.query.get("endpoint"))

    async def _purge(self, call: Call) -> dict[str, int]:
        return {"dropped": await purge_queue(self.server, call.query.get("endpoint"))}

    async def _routes(self, call: Call) -> RoutesView:
        limit, query = call.number("limit", _MOST_ROUTES), call.query
        return await list_routes(self.server, limit, query.get("request"), query.get("endpoint"))

    async def _settings(self, _: Call) -> dict[str, Any]:
        return {"object": "list", "data": await list_settings(self.server)}

    async def _set(self, call: Call) -> SettingRow:
        return await set_value(self.server, call.names["key"], str(call.fields(("value",)).get("value", "")))
