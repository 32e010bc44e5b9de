"""`dynamo config`: shows and changes the live settings of a running server."""

from __future__ import annotations

import asyncio

import msgspec

from dynamo_local.bus.events import publish_event
from dynamo_local.bus.jetstream.live_settings import read_settings, write_setting
from dynamo_local.bus.jetstream.streams import StreamAbsentError
from dynamo_local.core.errors import DecodeError, NotRunningError
from dynamo_local.core.live_settings import SETTINGS, LiveSetting, setting
from dynamo_local.core.messages.events import Event
from dynamo_local.core.subjects import Subjects
from dynamo_local.sdk.config.resolved import ResolvedGraph
from dynamo_local.supervisor.admin.connect import bus_of
from state.paths import StatePaths

SET, CONFIGURED, DEFAULT = "set", "configuration", "default"


class SettingRow(msgspec.Struct, frozen=True):
    """A live setting. `source`: "set" (since the server started), "configuration" (of the graph) or "default"."""

    key: str
    value: int
    source: str
    help: str


async def get_settings(paths: StatePaths, key: str | None) -> list[SettingRow]:
    """Read all settings, or one. Raises UsageError for an unknown key, NotRunningError without a server."""
    wanted = tuple(SETTINGS.values()) if key is None else (setting(key),)
    try:
        async with bus_of(paths, "config") as bus:
            stored = await read_settings(bus, Subjects(paths.namespace))
    except StreamAbsentError:
        # The server could not create the settings, and has reported that: none can have been set.
        stored = {}
    graph = await asyncio.to_thread(_graph, paths)
    return [row(known, stored, graph) for known in wanted]


async def set_value(paths: StatePaths, key: str, text: str) -> SettingRow:
    """Change a setting. Raises UsageError for an unknown key or a bad value, NotRunningError without a server."""
    known = setting(key)
    value = known.parse(text)
    try:
        async with bus_of(paths, "config") as bus:
            await write_setting(bus, Subjects(paths.namespace), key, value)
            event = Event("setting", f"{known.name} is {value}", "`dynamo config set`")
            await publish_event(bus, Subjects(paths.namespace), event)
    except StreamAbsentError as error:
        raise NotRunningError(
            f"the server in namespace {paths.namespace} has no live settings",
            "the first lines of `dynamo serve` tell why",
        ) from error
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
