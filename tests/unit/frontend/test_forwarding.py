"""What a frontend asks of its server, by the server's control API."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from components.frontend.http.forwarding import Forwarding
from components.frontend.http.waking import WakingServer
from dynamo_local.control.operations import GET_USAGE, LIST_ENDPOINTS, UPDATE_ENDPOINT, WAKE_ENDPOINT, Call
from dynamo_local.core.errors import DynamoError, NotRunningError, OrderError, SupervisorError, UnansweredError
from dynamo_local.core.http.bounds.admission import Refusal
from dynamo_local.supervisor.control.api import ControlApi, ControlSocket
from state.files import make_sockets, remove_run_directory
from state.locks import ServerLock
from state.paths import StatePaths
from tests.unit.frontend.asgi_driver import scope


@pytest.fixture
def paths(tmp_path: Path) -> StatePaths:
    return StatePaths(tmp_path, "many")


@asynccontextmanager
async def answering(paths: StatePaths, api: ControlApi) -> AsyncIterator[None]:
    paths.run_dir.mkdir(parents=True)
    socket = ControlSocket(api, make_sockets(paths).control)
    running = asyncio.create_task(socket.run())
    yield
    await socket.close(running)
    remove_run_directory(paths)


class Server:
    """A server that notes what it is asked. `refuses`: everything, from then on."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.refuses: DynamoError | None = None
        self.api = ControlApi()
        self.api.take(dict.fromkeys((GET_USAGE, LIST_ENDPOINTS, UPDATE_ENDPOINT, WAKE_ENDPOINT), self._note))

    async def _note(self, call: Call) -> dict[str, Any]:
        self.calls.append(call)
        if self.refuses is not None:
            raise self.refuses
        return {"asked": call.flag("asked"), "by": call.by}


async def test_no_query_of_a_client_reaches_an_order(paths: StatePaths) -> None:
    server, forward = Server(), Forwarding(paths)
    async with answering(paths, server.api):
        wake = scope("/v1/endpoints/chat/wake", query_string=b"asked=true")
        answer = await forward(wake, b"{}", "böss")
        assert isinstance(answer, tuple)
        assert (answer[0], json.loads(answer[1])) == (202, {"asked": False, "by": "böss"})
        assert (server.calls[0].names, server.calls[0].body) == ({"name": "chat"}, b"{}")
        usage = scope("/v1/usage", "GET", query_string="since=1d&by=key%2Cday&x=\xff'\"".encode("latin-1"))
        await forward(usage, b"", "boss")
        assert dict(server.calls[1].query) == {"since": "1d", "by": "key,day", "x": "\ufffd'\""}
        await forward(scope("/v1/usage", "GET", query_string=b""), b"", "boss")
        assert dict(server.calls[2].query) == {}


@pytest.mark.parametrize(
    ("error", "status", "kind", "retry_s"),
    [
        (OrderError("no such field", "leave it out", param="x"), 400, "BadRequestError", None),
        (SupervisorError("no memory", "end another"), 503, "ServiceUnavailableError", 2),
        (UnansweredError("the server is starting"), 503, "ServiceUnavailableError", 2),
    ],
)
async def test_refusals_are_as_the_server_has_them(
    paths: StatePaths, error: DynamoError, status: int, kind: str, retry_s: int | None
) -> None:
    server, forward = Server(), Forwarding(paths)
    server.refuses = error
    async with answering(paths, server.api):
        refused = await forward(scope("/v1/endpoints/chat", "PATCH"), b"{}", "boss")
    assert refused == Refusal(status, str(error), kind, getattr(error, "param", None), retry_s)  # type: ignore[arg-type]


async def test_a_server_that_does_not_answer_is_said_with_what_is_unsure(paths: StatePaths) -> None:
    forward = Forwarding(paths)
    for method, unsure in (("GET", False), ("PATCH", True)):
        refused = await forward(scope("/v1/endpoints/chat", method), b"{}", "boss")
        assert isinstance(refused, Refusal)
        assert refused.status == 503
        assert refused.message.startswith("the server does not answer: no server runs in namespace many")
        assert refused.message.endswith("look at what is there before you order it again") is unsure


async def test_a_refusal_to_wake_is_not_the_silence_of_a_server_that_starts(paths: StatePaths) -> None:
    waking = WakingServer(paths)
    with pytest.raises(NotRunningError):
        await waking.wake("chat")
    with ServerLock(paths):
        with pytest.raises(UnansweredError):
            await waking.wake("chat")
        async with answering(paths, ControlApi()):
            with pytest.raises(UnansweredError):
                await waking.wake("chat")
    server = Server()
    async with answering(paths, server.api):
        assert await waking.wake("chat") == ""
        assert server.calls[0].flag("asked")
        for error in (SupervisorError("no memory", "end another"), OrderError("no such name")):
            server.refuses = error
            assert await waking.wake("chat") == str(error)


async def test_a_server_that_is_stopped_holds_up_nobody_else(
    paths: StatePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that wait for a server that accepts connections and never answers hold up no other thread."""
    monkeypatch.setattr("components.frontend.http.waking.ANSWER_S", 0.5)
    waking = WakingServer(paths)
    paths.run_dir.mkdir(parents=True)
    with ServerLock(paths):
        socket = ControlSocket(ControlApi(), make_sockets(paths).control)
        asked = [asyncio.create_task(waking.wake(f"chat{number}")) for number in range(40)]
        await asyncio.sleep(0)
        assert await asyncio.to_thread(os.getpid) == os.getpid()
        assert not any(task.done() for task in asked)
        with pytest.raises(UnansweredError, match="the server in namespace many does not answer"):
            await asked[0]
        socket._socket.close()
        answers = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(answer, UnansweredError) for answer in answers)
    remove_run_directory(paths)
