"""A server of endpoints behind an imitated frontend, seen from outside."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dynamo_local.control.client import ControlClient
from dynamo_local.control.errors import ErrorBody, told_by
from dynamo_local.control.operations import (
    CREATE_ENDPOINT,
    GET_ENDPOINT,
    LIST_ENDPOINTS,
    WAKE_ENDPOINT,
    Operation,
)
from dynamo_local.core.endpoints.registry import Registry
from dynamo_local.core.messages.endpoints import Board, EndpointState, EndpointStatus, EndpointView, view_of
from state.endpoints.registry import read_registry
from tests.integration.server_process import ServerProcess, eventually

NAMESPACE = "many"
SLOTS = 3


@dataclass(frozen=True)
class Answered:
    """What an order was answered with: an endpoint, or a refusal."""

    content: Any
    refused: ErrorBody | None

    @property
    def view(self) -> EndpointView:
        assert self.refused is None, self.refused
        return view_of(self.content)


class EndpointServer(ServerProcess):
    """A server of endpoints, by default with three CPU slots. `turn_s`: how long a turn lasts."""

    def __init__(self, root: Path, slots: int = SLOTS, turn_s: float = 30) -> None:
        self.in_flight = root.parent / "in_flight"
        self._facts = root.parent / "machine.json"
        os.environ |= {"IN_FLIGHT": str(self.in_flight), "MACHINE_FACTS": str(self._facts)}
        arguments = ["-m", "tests.integration.endpoints.serve_endpoints", NAMESPACE, str(slots), str(turn_s)]
        super().__init__(root, NAMESPACE, arguments)
        self.await_start()

    def order(self, operation: Operation, name: str = "", fields: Any = None, *, query: str = "") -> Answered:
        """Give an order, and return its answer."""
        body = b"" if fields is None else msgspec.json.encode(fields)
        path = operation.path_for({"name": name}) + query
        _, content = ControlClient(self.paths).send(operation.method, path, body, timeout_s=30)
        return Answered(msgspec.json.decode(content), told_by(content))

    def ask(self, name: str = "chat") -> Answered:
        """Have an endpoint woken, as a frontend does that holds a request for it."""
        return self.order(WAKE_ENDPOINT, name, query="?asked=true")

    def create(self, name: str, **fields: Any) -> Answered:
        return self.order(CREATE_ENDPOINT, "", {"name": name, "model": "random", "engine": "mocker", **fields})

    def views(self) -> list[EndpointView]:
        return [view_of(content) for content in self.order(LIST_ENDPOINTS).content["data"]]

    def status(self, name: str) -> EndpointStatus | None:
        """State of the endpoint; None if there is none."""
        found = self.order(GET_ENDPOINT, name)
        return None if found.refused is not None and found.refused.code == 404 else found.view.status

    def is_ready(self, name: str, workers: int = 1, revision: int | None = None) -> bool:
        status = self.status(name)
        return (
            status is not None
            and (status.state, status.ready) == ("ready", workers)
            and revision in (None, status.revision)
        )

    def await_ready(self, name: str, workers: int = 1, revision: int | None = None) -> None:
        eventually(lambda: self.is_ready(name, workers, revision), f"{name} is not ready: {self.status(name)}")

    def rest_of_output(self) -> str:
        """All that the server has said so far."""
        while not self._queue.empty():
            self.lines.append(self._queue.get() or "(ended)")
        return self.output

    def await_state(self, name: str, *states: EndpointState) -> EndpointStatus:
        """Wait until the endpoint is in one of these states."""
        seen = [self.status(name)]

        def is_so() -> bool:
            seen.append(self.status(name))
            return seen[-1] is not None and seen[-1].state in states

        eventually(is_so, f"{name} is not {' or '.join(states)}: {seen[-1]}")
        assert seen[-1] is not None
        return seen[-1]

    def await_reason(self, name: str, *parts: str) -> EndpointStatus:
        """Wait until the reason for the endpoint's state has these parts."""
        seen: list[EndpointStatus | None] = []

        def is_so() -> bool:
            seen.append(self.status(name))
            return seen[-1] is not None and all(part in seen[-1].reason for part in parts)

        eventually(is_so, f"{name} does not say {parts}")
        assert seen[-1] is not None
        return seen[-1]

    def hold(self, requests: Mapping[str, int]) -> None:
        """Have the frontend say that it holds so many requests for these endpoints, and none for others."""
        whole = self.in_flight.with_suffix(".new")
        whole.write_bytes(msgspec.json.encode({name: (held, held) for name, held in requests.items()}))
        whole.rename(self.in_flight.with_suffix(".json"))

    def make_up(self, *, gone: Mapping[int, str] | None = None, free_gib: float | None = None) -> None:
        """Make up what the machine has: all devices are there, and memory is unknown, unless it is said here."""
        whole = self._facts.with_suffix(".new")
        whole.write_bytes(msgspec.json.encode({"gone": gone or {}, "free": free_gib}))
        whole.rename(self._facts)

    def use(self, requests: int) -> None:
        """Have the frontend say that so many requests are under way in each revision."""
        whole = self.in_flight.with_suffix(".new")
        whole.write_text(str(requests))
        whole.rename(self.in_flight.with_suffix(".taken"))

    def board(self) -> dict[str, bool]:
        """The revisions on the board, and whether each takes requests."""
        board = msgspec.json.decode(self.paths.board_file.read_bytes(), type=Board)
        return {revision.revision: revision.takes_requests for revision in board.revisions}

    def workers(self, revision: str) -> list[str]:
        """The watchers of a revision that hold devices."""
        return [c.watcher_name for c in self.state().components.values() if c.watcher.revision == revision and c.holds]

    def registry(self) -> Registry:
        return read_registry(self.paths)
