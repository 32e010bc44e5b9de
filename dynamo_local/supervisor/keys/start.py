"""Looks after the API keys of a server that runs, or of a namespace whose server does not."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from dynamo_local.control.operations import Call, Operation
from dynamo_local.supervisor.endpoints.kept_registry import KeptDocument
from dynamo_local.supervisor.keys.orders import KeyOrders
from dynamo_local.supervisor.server.reports.event_log import EventLog
from dynamo_local.supervisor.server.reports.report import Report
from state.documents import DocumentStore
from state.files import make_private_directory
from state.keys import KEYS
from state.limits_file import tell_keys_changed
from state.locks import ServerLock
from state.paths import StatePaths

if TYPE_CHECKING:
    from dynamo_local.supervisor.server.controlled import ControlledServer


async def take_key_orders(server: ControlledServer) -> None:
    """Open the registry of keys, and take orders from now on. Raises StateError."""
    changed = partial(tell_keys_changed, server.launch.paths)
    kept = await KeptDocument.open(DocumentStore(KEYS, server.lock), server.report)
    orders = KeyOrders(kept, server.record, changed)
    changed()
    server.control.take(orders.handlers)


async def do_without_server(paths: StatePaths, operation: Operation, call: Call, report: Report) -> Any:
    """Carry out an order in a namespace whose server does not run. Raises UsageError, StateError."""
    make_private_directory(paths.root)
    with ServerLock(paths) as lock:
        make_private_directory(paths.logs_dir)
        kept = await KeptDocument.open(DocumentStore(KEYS, lock), report)
        orders = KeyOrders(kept, EventLog(paths.events_file, report).add)
        return await orders.handlers[operation](call)
