"""Answers questions and orders of the control API about what runs and what it does."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any

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


def admin_handlers(server: AskedServer) -> Handlers:
    """Return what answers from the start on: what is not known yet is said so."""

    async def list_workers(call: Call) -> dict[str, Any]:
        others = {"held_by_others": await devices_of_others(server)} if call.flag("others") else {}
        return {**await _listed(list_watchers(server)), **others}

    async def take_role(call: Call) -> dict[str, str]:
        watcher, wish = call.names["watcher"], call.content(RoleWish)
        return {"watcher": watcher, "role": await change_role(server, watcher, wish)}

    async def purge(call: Call) -> dict[str, int]:
        return {"dropped": await purge_queue(server, call.query.get("endpoint"))}

    return {
        LIST_WORKERS: list_workers,
        CHANGE_ROLE: take_role,
        LOOK: lambda _: server.look(),
        DESCRIBE: lambda call: describe(server, call.names["name"]),
        LIST_REQUESTS: lambda call: list_requests(
            server, call.number("limit", 100), call.query.get("worker"), call.query.get("endpoint")
        ),
        MIGRATE: lambda call: _listed(migrate(server, call.content(MigrationWish))),
        READ_QUEUE: lambda call: read_queue(server, call.number("limit", 100), call.query.get("endpoint")),
        PURGE_QUEUE: purge,
        LIST_ROUTES: lambda call: list_routes(
            server, call.number("limit", 20), call.query.get("request"), call.query.get("endpoint")
        ),
        LIST_SETTINGS: lambda _: _listed(list_settings(server)),
        SET_SETTING: lambda call: set_value(server, call.names["key"], str(call.fields(("value",)).get("value", ""))),
    }


async def _listed(rows: Awaitable[Sequence[Any]]) -> dict[str, Any]:
    return {"object": "list", "data": await rows}
