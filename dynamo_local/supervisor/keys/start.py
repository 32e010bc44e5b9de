"""Looks after the API keys of a server that runs, or of a namespace whose server does not."""

from __future__ import annotations

import asyncio

from dynamo_local.bus.subscriptions import Answer
from dynamo_local.core.keys.registry import KeyRegistry
from dynamo_local.core.messages.keys import KeyOrder, KeysAnswer, ListKeys
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.endpoints.kept_registry import KeptDocument
from dynamo_local.supervisor.keys.orders import KeyOrders
from dynamo_local.supervisor.server.controlled import ControlledServer
from dynamo_local.supervisor.server.reports.event_log import EventLog
from dynamo_local.supervisor.server.reports.report import Report
from state.documents import DocumentStore
from state.files import make_private_directory
from state.keys import KEYS
from state.limits_file import tell_keys_changed
from state.locks import ServerLock
from state.paths import StatePaths


async def take_key_orders(server: ControlledServer) -> None:
    """Open the registry of keys, and take orders from the bus from now on. Raises StateError."""
    paths = server.launch.paths
    orders = KeyOrders(await _open(server.lock, server.report), server.record)
    tell_keys_changed(paths)

    async def on_order(order: KeyOrder, answer: Answer) -> None:
        answered = await orders.answer(order)
        if not isinstance(order, ListKeys):
            # Before it is answered: a key that is said to be revoked is known to no frontend any more.
            tell_keys_changed(paths)
        await answer.send(answered)

    await server.bus.serve(Subjects(paths.namespace).keys, KeyOrder, on_order)


async def order_without_server(paths: StatePaths, order: KeyOrder, report: Report) -> KeysAnswer:
    """Carry out an order in a namespace whose server does not run. Raises NamespaceBusyError, StateError."""
    make_private_directory(paths.root)
    with ServerLock(paths) as lock:
        make_private_directory(paths.logs_dir)
        return await KeyOrders(await _open(lock, report), EventLog(paths.events_file, report).add).answer(order)


async def _open(lock: ServerLock, report: Report) -> KeptDocument[KeyRegistry]:
    store = DocumentStore(KEYS, lock)
    registry, notes = await asyncio.to_thread(store.open)
    for note in notes:
        report.step(note)
    return KeptDocument(store, registry)
