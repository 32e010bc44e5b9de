"""Drives an ASGI application by hand: what no client library would send, and when it hangs up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from components.frontend.http.gate import HttpGate, SettingNames
from components.frontend.http.models import ModelEntry, ModelTable
from components.frontend.request_context import request_here
from dynamo_local.core.http.asgi import App, Event, Receive, Scope, Send
from dynamo_local.core.http.bounds.admission import AdmissionLimits
from dynamo_local.core.http.bounds.limits import LIMITED
from dynamo_local.tasks import unless

LIMITS = AdmissionLimits(max_body_bytes=1000, max_requests=4, hold_timeout_s=0)


@dataclass
class Answer:
    """What came back. `status` is None if nothing did. `path`: of the request."""

    path: str = field(default="", compare=False)
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    ended: bool = False

    @property
    def error(self) -> dict[str, Any]:
        """The error, which has the shape of the API that was asked."""
        content = json.loads(self.body)
        if self.path.startswith("/v1/messages"):
            assert (set(content), content["type"]) == ({"type", "error"}, "error")
            assert set(content["error"]) == {"type", "message"}
            assert self.headers["content-type"] == "application/json"
            return dict(content["error"])
        assert set(content) == {"error"}
        assert set(content["error"]) == {"message", "type", "param", "code"}
        assert content["error"]["code"] == (LIMITED if self.status == 429 else self.status)
        assert self.headers["content-type"] == "application/json"
        return dict(content["error"])


def scope(path: str, method: str = "POST", headers: Sequence[tuple[str, str]] = (), **more: Any) -> Scope:
    raw = [(name.lower().encode(), value.encode()) for name, value in headers]
    return {"type": "http", "method": method, "path": path, "headers": raw, "root_path": "", **more}


async def call(
    app: App,
    asked: Scope,
    body: Sequence[bytes] = (b"",),
    *,
    hang_up: bool = False,
    leaves: asyncio.Event | None = None,
    answer: Answer | None = None,
) -> Answer:
    """One request, its body in pieces. With `hang_up` the client is gone instead of sending the last piece.

    Otherwise it is gone when `leaves` is set, or its answer is whole. `answer` is filled as it comes.
    """
    events: list[Event] = [
        {"type": "http.request", "body": piece, "more_body": True} for piece in body[: len(body) - 1]
    ]
    if not hang_up:
        events.append({"type": "http.request", "body": body[-1], "more_body": False})
    answer = Answer() if answer is None else answer
    answer.path = asked["path"]
    gone = asyncio.Event() if leaves is None else leaves
    if hang_up:
        gone.set()

    async def receive() -> Event:
        if not events:
            await gone.wait()
        return events.pop(0) if events else {"type": "http.disconnect"}

    async def send(event: Event) -> None:
        if event["type"] == "http.response.start":
            assert answer.status is None, "two answers"
            answer.status = event["status"]
            answer.headers = {name.decode(): value.decode() for name, value in event["headers"]}
        else:
            assert not answer.ended, "more after the end"
            answer.body += event.get("body", b"")
            answer.ended = not event.get("more_body", False)
            if answer.ended:
                gone.set()

    await app(asked, receive, send)
    return answer


async def disconnected(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass
class Backend:
    """The application behind the gate: reads its request, notes it as submitted, and answers when it may.

    As vLLM's does, it answers `null` to a client that has gone before.
    """

    requests: list[tuple[str, str, bytes]] = field(default_factory=list)
    after_body: list[str] = field(default_factory=list)
    """Types of the events that came after the body."""
    fails: bool = False
    answers: tuple[int, str, bytes] = (200, "", b"served")
    """Status, content type and body."""
    refuses: bytes = b"refuses"
    """A request with this in its body is answered with 400 instead."""
    open: asyncio.Event = field(default_factory=asyncio.Event)
    entered: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    def __post_init__(self) -> None:
        self.open.set()

    async def __call__(self, asked: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            event = await receive()
            body += event.get("body", b"")
            more = event.get("more_body", False)
        if self.refuses in body:
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": b"bad"})
            return
        submitted = asyncio.Event()

        def submit() -> None:
            self.requests.append((asked["method"], asked["path"], body))
            self.entered.release()
            submitted.set()

        async def wait() -> None:
            request_here().submit(submit)
            await submitted.wait()
            await self.open.wait()

        if not await unless(disconnected(receive), wait()):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"null"})
            return
        if self.fails:
            raise RuntimeError("the server behind fails")
        status, kind, content = self.answers
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(content)).encode())] if kind else []
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})
        self.after_body.append((await receive())["type"])


@dataclass
class House:
    """A gate with a backend behind it, and the switches of the frontend."""

    limits: AdmissionLimits = field(default_factory=lambda: LIMITS)
    keys: Sequence[str] = ()
    worker: bool = True
    draining: bool = False
    backend: Backend = field(default_factory=Backend)

    def __post_init__(self) -> None:
        entry = ModelEntry(["m"], lambda: None if self.worker else "no worker is ready", self.limits, self.backend)
        names = SettingNames("Front", {"tool-call-parser", "enable-auto-tool-choice"})
        self.gate = HttpGate(
            self.backend,
            limits=self.limits,
            models=ModelTable([entry]),
            is_draining=lambda: self.draining,
            api_keys=self.keys,
            names=names,
        )

    async def post(self, path: str, body: Any = None, headers: Sequence[tuple[str, str]] = ()) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        return await call(self.gate, scope(path, headers=headers), [data])

    async def get(self, path: str, method: str = "GET", headers: Sequence[tuple[str, str]] = ()) -> Answer:
        return await call(self.gate, scope(path, method, headers))

    async def free_sequences(self) -> int:
        """How many more sequences the gate would let in, asked of the gate itself."""
        free, self.backend.fails = 0, False
        self.backend.open.clear()
        calls = list[asyncio.Task[Answer]]()
        for _ in range(self.limits.max_requests + 1):
            calls.append(asyncio.create_task(self.post("/v1/completions")))
            entering = asyncio.create_task(self.backend.entered.acquire())
            await asyncio.wait({calls[-1], entering}, return_when=asyncio.FIRST_COMPLETED)
            if calls[-1].done():
                assert calls[-1].result().status == 429
                entering.cancel()
                break
            free += 1
        self.backend.open.set()
        await asyncio.gather(*calls)
        return free
