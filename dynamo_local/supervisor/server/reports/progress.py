"""Reports the progress of services while they come up, by their presences."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dynamo_local.core.fleet.view import PREFILL_ROLE, WORKER_ROLES, Change, Happened
from dynamo_local.core.messages.endpoints import EndpointView
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.names import short_watcher
from dynamo_local.supervisor.server.reports.report import Report

QUIET_S = 2.0
"""Longest time without a line while services come up."""

_SPELLED = {"vllm": "vLLM"}
"""Modules whose names are spelled otherwise in sentences."""


@dataclass
class Progress:
    """Follows presences. `all_ready` is set once every expected watcher has announced that it is ready. `on_ready` is
    called with each watcher that does. `importing`: what the process of a watcher imports before it can announce
    anything."""

    expected: Collection[str]
    report: Report
    on_ready: Callable[[str], None]
    importing: Mapping[str, str] = field(default_factory=dict)
    all_ready: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _reported_at: float = field(default_factory=time.monotonic, init=False)
    _last: dict[str, Presence] = field(default_factory=dict, init=False)

    def on_change(self, change: Change) -> None:
        """Note a change of the fleet, and report it if it changes a state.

        While services come up, `wait` reports together what those that start are doing. A process that starts later is
        reported once.
        """
        presence = change.presence
        name = presence.watcher
        if change.what in (Happened.LEFT, Happened.REVOKED) and not change.failed:
            if name in self._last and self._last[name].lease == presence.lease:
                del self._last[name]
            return
        before = self._last.get(name)
        self._last[name] = presence
        if self._is_news(before, presence):
            self.report.step(f"{name}  {described(presence)}")
            self._reported_at = time.monotonic()
        if presence.state == "ready":
            self.on_ready(name)
        if all(self._is_ready(watcher) for watcher in self.expected):
            self.all_ready.set()

    def _is_news(self, before: Presence | None, now: Presence) -> bool:
        if now.state == "starting":
            return self.all_ready.is_set() and (before is None or before.lease != now.lease)
        return before is None or _shown(before) != _shown(now)

    async def wait(self, quiet_s: float = QUIET_S) -> None:
        """Wait until all are ready. Whenever nothing was reported for `quiet_s`, report what is awaited."""
        while not self.all_ready.is_set():
            left_s = self._reported_at + quiet_s - time.monotonic()
            if left_s <= 0:
                self.report.pending(f"waiting for {self.awaited()}")
                self._reported_at = time.monotonic()
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self.all_ready.wait()

    def presence(self, watcher: str) -> Presence | None:
        """The last presence of the watcher's process, if it is still there."""
        return self._last.get(watcher)

    def not_ready(self) -> str:
        """The watchers that are not ready, each with its last state, in words."""
        awaited = [watcher for watcher in self.expected if not self._is_ready(watcher)]
        return ", ".join(f"{short_watcher(watcher)} ({self._last_state(watcher)})" for watcher in awaited)

    def awaited(self) -> str:
        """The watchers that are not ready, by what they are doing, in words."""
        states: dict[str, list[str]] = {}
        for watcher in self.expected:
            if not self._is_ready(watcher):
                doing = self._last_state(watcher).removeprefix("starting: ")
                states.setdefault(doing, []).append(short_watcher(watcher))
        return "; ".join(f"{', '.join(watchers)} ({state})" for state, watchers in states.items())

    def models(self) -> tuple[str, ...]:
        """The names of the models that workers serve, sorted."""
        return tuple(sorted({presence.engine.model for presence in self._workers() if presence.engine is not None}))

    def tasks(self) -> tuple[str, ...]:
        """What the workers' engines can be asked for, sorted."""
        engines = [presence.engine for presence in self._workers() if presence.engine is not None]
        return tuple(sorted({task for engine in engines for task in engine.tasks}))

    def summary(self) -> str:
        """The model that is served and the number of workers, in words."""
        workers, models = self._workers(), self.models()
        if not workers:
            return _count(len(self._present()), "service process", "service processes")
        count = _count(len(workers), "worker", "workers")
        prefill = sum(presence.role == PREFILL_ROLE for presence in self._present())
        if prefill:
            count = f"{count}, {_count(prefill, 'prefill worker', 'prefill workers')}"
        return f"model {', '.join(models)}, {count}" if models else count

    def _present(self) -> list[Presence]:
        return [self._last[watcher] for watcher in self.expected if watcher in self._last]

    def _workers(self) -> list[Presence]:
        return [presence for presence in self._present() if presence.role in WORKER_ROLES]

    def _is_ready(self, watcher: str) -> bool:
        presence = self._last.get(watcher)
        return presence is not None and presence.state == "ready"

    def _last_state(self, watcher: str) -> str:
        presence = self._last.get(watcher)
        if presence is not None:
            return described(presence)
        module = self.importing.get(watcher)
        return "its process starts" if module is None else f"importing {_SPELLED.get(module, module)}"


def described(presence: Presence) -> str:
    """State and detail in words, such as "starting: loading weights"."""
    return f"{presence.state}: {presence.detail}" if presence.detail else presence.state


def _shown(presence: Presence) -> tuple[str, str, str]:
    return presence.lease, presence.state, presence.detail


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


# What `dynamo serve` says once all services are ready: where the API is, and what can be done next.

_EXAMPLES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "generate": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    "embed": ("/v1/embeddings", {"input": "Hello"}),
    "classify": ("/classify", {"input": "Hello"}),
    "token_embed": ("/pooling", {"input": "Hello"}),
    "token_classify": ("/pooling", {"input": "Hello"}),
}
"""A path and a body for each task of engines; for an engine with several, the first."""

_ANSWERS = frozenset({"ready", "updating", "parked", "asleep", "waking"})
_MOST_NAMED = 8
"""Endpoints that are named; the others are only counted."""


def ready_lines(
    url: str | None,
    summary: str,
    models: Sequence[str],
    tasks: Collection[str] = ("generate",),
    endpoints: Sequence[EndpointView] = (),
) -> list[str]:
    """Return the lines. `url` is the address of the API, None for a graph without one. `summary`: what is served, in
    words. `models`: the names that requests may give for the graph's own model, and `tasks` those of its engines.
    `endpoints`: as they are now; some may still come up."""
    if url is None:
        return [f"all services ready ({summary})", _COMMANDS]
    lines = [f"API ready at {url} ({summary})", *_endpoint_lines(endpoints)]
    ready = [view.spec.name for view in endpoints if view.status.state in _ANSWERS]
    example = next((example for task, example in _EXAMPLES.items() if task in tasks), None)
    if models and example is not None:
        lines += _try_it(url, example, models[0])
    elif ready and not models:
        lines += _try_it(url, _EXAMPLES["generate"], ready[0])
    elif endpoints:
        lines.append(f"  try it   curl {url}/v1/models lists those that are ready")
    return [*lines, _COMMANDS]


def _endpoint_lines(endpoints: Sequence[EndpointView]) -> list[str]:
    """The first endpoints with their states, and the commands for them."""
    if not endpoints:
        return []
    shown = [f"{view.spec.name} ({view.status.state})" for view in endpoints[:_MOST_NAMED]]
    if len(endpoints) > len(shown):
        shown.append(f"and {len(endpoints) - len(shown)} more")
    return [
        f"  models   {', '.join(shown)}",
        "           dynamo endpoint list, dynamo wait NAME, dynamo endpoint create NAME --model MODEL",
    ]


def _try_it(url: str, example: tuple[str, Mapping[str, Any]], model: str) -> list[str]:
    path, asked = example
    body = json.dumps({"model": model, **asked})
    return [
        f"  try it   curl {url}{path} -H 'Content-Type: application/json' \\",
        f"             -d {shlex.quote(body)}",
    ]


_COMMANDS = "  look     dynamo ps, dynamo top, dynamo logs -f\n  stop     Ctrl-C here, or dynamo stop elsewhere"
