"""Sends orders about endpoints, and waits for what comes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import click
import msgspec

from dynamo_local.cli.endpoints.text import as_json_text, ordered_text
from dynamo_local.cli.output.console import Console
from dynamo_local.core.messages.endpoints import (
    CreateEndpoint,
    DeleteEndpoint,
    EndpointState,
    EndpointView,
    ParkEndpoint,
    UpdateEndpoint,
    WakeEndpoint,
)
from dynamo_local.supervisor.admin.orders.endpoints import ANSWERS, RESTS, client_of
from dynamo_local.supervisor.server.reports.report import Report
from state.paths import StatePaths

Order = CreateEndpoint | UpdateEndpoint | ParkEndpoint | WakeEndpoint


def send_and_wait(paths: StatePaths, order: Order, *, wait: bool, timeout_s: float, as_json: bool) -> None:
    """Send the order, and print the endpoint as it is then. Raises DynamoError."""
    view = asyncio.run(_send(paths, order, timeout_s if wait else None, Console(err=as_json)))
    click.echo(as_json_text(view) if as_json else ordered_text(view))


async def delete(paths: StatePaths, name: str, timeout_s: float | None, report: Report) -> None:
    """Delete an endpoint, and wait until it is gone; `timeout_s` None: do not wait. Raises DynamoError."""
    async with client_of(paths) as client:
        await client.send(DeleteEndpoint(name))
        if timeout_s is not None:
            await client.wait_until_gone(name, timeout_s, report)


async def _send(paths: StatePaths, order: Order, timeout_s: float | None, report: Report) -> EndpointView:
    async with client_of(paths) as client:
        ordered = await client.order(order)
        if timeout_s is None:
            return ordered
        view = await client.wait_until_ready(ordered, timeout_s, report, _awaited(order))
        return msgspec.structs.replace(view, adapter=ordered.adapter)


def _awaited(order: Order) -> Collection[EndpointState]:
    """The states in which the order is carried out."""
    match order:
        case ParkEndpoint():
            return RESTS
        case WakeEndpoint():
            return frozenset[EndpointState]({"ready"})
        case _:
            return ANSWERS
