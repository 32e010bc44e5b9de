"""The control API over a real socket: what is asked arrives, what goes wrong is told, and nobody else gets in."""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.control.client import ControlClient
from dynamo_local.control.operations import (
    CREATE_KEY,
    GET_KEY,
    LIST_KEYS,
    MOST_BYTES,
    OPERATIONS,
    REVOKE_KEY,
    ROTATE_KEY,
    Call,
    fields_of,
)
from dynamo_local.core.errors import (
    DynamoError,
    EndpointAbsentError,
    KeyAbsentError,
    KeyConflictError,
    NotRunningError,
    OrderError,
    StateError,
    SupervisorError,
    UnansweredError,
    UsageError,
)
from dynamo_local.supervisor.control.api import ControlApi, ControlSocket
from state.files import make_private_directory, sockets_of
from state.locks import ServerLock
from state.paths import StatePaths

ANSWERED_S = 20.0


class Served:
    """A control API on the socket of a namespace, and its client."""

    def __init__(self, paths: StatePaths) -> None:
        self.api = ControlApi()
        self.path = sockets_of(paths).control
        self.socket = ControlSocket(self.api, self.path)
        self.running = asyncio.create_task(self.socket.run())
        self.client = ControlClient(paths)

    async def do(self, *arguments: Any, **names: Any) -> Any:
        return await asyncio.to_thread(self.client.do, *arguments, timeout_s=ANSWERED_S, **names)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    paths = StatePaths(tmp_path, "dynamo")
    make_private_directory(paths.run_dir)
    with ServerLock(paths):
        served = Served(paths)
        yield served
        await served.socket.close(served.running)


async def echo(call: Call) -> Any:
    return {"names": dict(call.names), "query": dict(call.query), "fields": call.fields(), "by": call.by}


async def test_what_is_asked_arrives_and_its_answer_comes_back(served: Served) -> None:
    served.api.take({ROTATE_KEY: echo})
    answer = await served.do(ROTATE_KEY, {"overlap_s": 5}, query={"a": "b c"}, name="ä/b %41?")
    assert answer == {"names": {"name": "ä/b %41?"}, "query": {"a": "b c"}, "fields": {"overlap_s": 5}, "by": ""}
    path = ROTATE_KEY.path_for({"name": "x"})
    status, content = await asyncio.to_thread(served.client.send, "POST", path, b"", by="ä key")
    assert (status, '"by":"ä key"' in content.decode()) == (200, True)


@pytest.mark.parametrize(
    ("raised", "kind", "status"),
    [
        (UsageError("a", "b"), UsageError, 400),
        (OrderError("a", "b", param="c"), UsageError, 400),
        (KeyAbsentError("a", "b"), EndpointAbsentError, 404),
        (KeyConflictError("a"), UsageError, 409),
        (StateError("a", "b"), SupervisorError, 503),
    ],
)
async def test_an_error_is_the_same_sentence_for_who_has_asked(
    served: Served, raised: DynamoError, kind: type[DynamoError], status: int
) -> None:
    async def fail(_: Call) -> Any:
        raise raised

    served.api.take({GET_KEY: fail})
    with pytest.raises(kind) as error:
        await served.do(GET_KEY, name="x")
    assert (error.value.cause, error.value.remedy) == (raised.cause, raised.remedy)
    assert (await asyncio.to_thread(served.client.send, "GET", "/v1/keys/x", b""))[0] == status


async def test_until_the_server_can_answer_it_says_that_it_starts(served: Served) -> None:
    with pytest.raises(SupervisorError, match="the server is only starting"):
        await served.do(LIST_KEYS)
    served.api.take({LIST_KEYS: echo})
    assert (await served.do(LIST_KEYS))["by"] == ""


async def test_a_body_has_a_bound_and_garbage_ends_its_own_connection_alone(served: Served) -> None:
    served.api.take({CREATE_KEY: echo, LIST_KEYS: echo})
    status, _ = await asyncio.to_thread(served.client.send, "POST", "/v1/keys", b"x" * (MOST_BYTES + 1))
    assert status == 413
    for garbage in (b"\0" * 100, b"GET / HTTP/1.1\r\n\r\n", b"POST /v1/keys HTTP/1.1\r\ncontent-length: -1\r\n\r\n"):
        with socket.socket(socket.AF_UNIX) as stranger:
            await asyncio.to_thread(stranger.connect, str(served.path))
            await asyncio.to_thread(stranger.sendall, garbage)
    with pytest.raises(UsageError, match="not a JSON object"):
        await served.do(CREATE_KEY, ["not", "an", "object"])
    assert await served.do(LIST_KEYS)


async def test_only_the_owner_may_open_the_socket(served: Served) -> None:
    assert stat.S_IMODE(served.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(served.path.parent.stat().st_mode) == 0o700


async def test_a_socket_that_was_removed_is_made_again(served: Served) -> None:
    served.api.take({LIST_KEYS: echo})
    await served.do(LIST_KEYS)
    served.path.unlink()
    async with asyncio.timeout(ANSWERED_S):
        while not served.path.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await served.do(LIST_KEYS)
    assert stat.S_IMODE(served.path.stat().st_mode) == 0o600


async def test_what_is_under_way_at_the_end_is_answered(served: Served) -> None:
    began, may_end = asyncio.Event(), asyncio.Event()

    async def slow(_: Call) -> Any:
        began.set()
        await may_end.wait()
        return {"done": True}

    served.api.take({LIST_KEYS: slow})
    asking = asyncio.create_task(served.do(LIST_KEYS))
    await began.wait()
    closing = asyncio.create_task(served.socket.close(served.running))
    may_end.set()
    assert await asking == {"done": True}
    await closing
    with pytest.raises(UnansweredError):
        await served.do(LIST_KEYS)


async def test_the_document_has_what_can_be_asked(served: Served) -> None:
    status, content = await asyncio.to_thread(served.client.send, "GET", "/openapi.json", b"")
    described = msgspec.json.decode(content)["paths"]
    assert status == 200
    assert {(method.upper(), path) for path, methods in described.items() for method in methods} == {
        (operation.method, operation.path) for operation in OPERATIONS
    }
    (name,) = described["/v1/keys/{name}/rotate"]["post"]["parameters"]
    assert (name["name"], name["in"]) == ("name", "path")


def test_without_a_server_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotRunningError, match="no server runs in namespace dynamo"):
        ControlClient(StatePaths(tmp_path, "dynamo")).do(LIST_KEYS)


def test_operations_do_not_hide_each_other() -> None:
    assert len({operation.name for operation in OPERATIONS}) == len(OPERATIONS)
    assert len({(operation.method, operation.path) for operation in OPERATIONS}) == len(OPERATIONS)
    assert all(operation.does.endswith(".") for operation in OPERATIONS)


@given(st.binary(max_size=40))
def test_any_body_is_fields_or_an_error_that_says_why(body: bytes) -> None:
    with suppress(OrderError):
        assert isinstance(fields_of(body), dict)


def test_unknown_fields_are_named(tmp_path: Path) -> None:
    with pytest.raises(OrderError, match="there is no field 'opens'; there is open"):
        Call(body=b'{"opens": true}').fields(REVOKE_KEY.takes)
