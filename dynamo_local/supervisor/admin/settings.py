"""Shows and changes the live settings of a running server."""

from __future__ import annotations

import asyncio

from dynamo_local.bus.jetstream.live_settings import read_settings, write_setting
from dynamo_local.bus.jetstream.streams import StreamAbsentError
from dynamo_local.control.answers import SettingRow
from dynamo_local.core.errors import DecodeError, NotRunningError
from dynamo_local.core.live_settings import SETTINGS, LiveSetting, setting
from dynamo_local.core.messages.events import Event
from dynamo_local.core.subjects import Subjects
from dynamo_local.sdk.config.resolved import ResolvedGraph
from dynamo_local.supervisor.admin.asked import AskedServer
from state.paths import StatePaths

SET, CONFIGURED, DEFAULT = "set", "configuration", "default"


async def list_settings(server: AskedServer) -> list[SettingRow]:
    """Read all settings. Raises SupervisorError, BusError."""
    try:
        stored = await read_settings(await server.bus(), Subjects(server.paths.namespace))
    except StreamAbsentError:
        # The server could not create the settings, and has reported that: none can have been set.
        stored = {}
    graph = await asyncio.to_thread(_graph, server.paths)
    return [row(known, stored, graph) for known in SETTINGS.values()]


async def set_value(server: AskedServer, key: str, text: str) -> SettingRow:
    """Change a setting. Raises UsageError for an unknown key or a bad value, SupervisorError, BusError."""
    known, namespace = setting(key), server.paths.namespace
    value = known.parse(text)
    try:
        await write_setting(await server.bus(), Subjects(namespace), key, value)
    except StreamAbsentError as error:
        raise NotRunningError(
            f"the server in namespace {namespace} has no live settings",
            "the first lines of `dynamo serve` tell why",
        ) from error
    server.record(Event("setting", f"{known.name} is {value}", "`dynamo config set`"))
    return SettingRow(known.name, value, SET, known.help)


def row(known: LiveSetting, stored: dict[str, int], graph: ResolvedGraph | None) -> SettingRow:
    """The value of a setting: the one that was set, else the graph's configuration, else the default."""
    if known.name in stored:
        return SettingRow(known.name, stored[known.name], SET, known.help)
    for service in reversed(graph.services if graph is not None else ()):
        configured = service.config.get(known.name)
        if isinstance(configured, int):
            return SettingRow(known.name, int(configured), CONFIGURED, known.help)
    return SettingRow(known.name, known.default, DEFAULT, known.help)


def _graph(paths: StatePaths) -> ResolvedGraph | None:
    """The graph that the server runs; None if the server is just ending."""
    try:
        return ResolvedGraph.from_json(paths.graph_file.read_bytes())
    except (OSError, DecodeError):
        return None
